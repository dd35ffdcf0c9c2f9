"""`torchtitan-lite estimate --failures`."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchtitan_lite.cli import main

SHORT = ("estimate", "--failures", "--ranks", "8,64", "--num-failures", "50")


def test_the_command_writes_table_values_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, plot = tmp_path / "values.json", tmp_path / "plot.svg"
    more = ("--set", "mtbf_h=1000", "--json", str(values), "--failure-plot", str(plot))
    assert main([*SHORT, *more]) == 0
    out = capsys.readouterr().out
    assert "one per 1,000 h and rank" in out
    assert "measured: recovery.json" in out and "given" in out
    found = json.loads(values.read_text())
    assert found["inputs"]["mtbf_h"] == {"value": 1000.0, "source": "given"}
    assert [one["ranks"] for one in found["predictions"]] == [8] * 5 + [64] * 5
    for one in found["predictions"]:
        assert f"{one['goodput']:.2%}" in out
        assert sum(one["shares"].values()) == pytest.approx(1)
    picture = ElementTree.fromstring(plot.read_text())
    lines = [one for one in picture.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 5
    texts = "\n".join(one.text or "" for one in picture.iter() if one.tag.endswith("text"))
    for one in found["predictions"][5:]:
        assert f"{one['goodput'] * 100:.1f} %" in texts


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text("0,add,a\n0,add,b\n0,add,c\n3600000,remove,a\n7200000,add,d\n")
    plot = tmp_path / "plot.svg"
    arguments = ("--trace", str(trace), "--failure-plot", str(plot))
    assert main(["estimate", "--failures", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2.0 h, 1 machines lost, at most 3 at a time" in out
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["estimate"], "--config and --world-size are required, or --failures"),
        (["estimate", "--failures", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["estimate", "--failures", "--ranks", "8,x"], "'x' is not a whole number"),
        (["estimate", "--failures", "--set", "mtbf_h"], "'mtbf_h' is not of the form NAME=VALUE"),
        (["estimate", "--failures", "--set", "mtbf_h=0"], "mtbf_h is 0, must be"),
        (
            ["estimate", "--failures", "--ranks", "12,100"],
            "not a multiple of the 8 ranks of a machine",
        ),
        (["estimate", "--failures", "--trace", "missing.csv"], "missing.csv"),
        (["estimate", "--failures", "--published", "--set", "step_s=1"], "omit --set, --trace"),
    ],
)
def test_an_invalid_command_line_is_one_line_and_imports_no_torch(
    arguments: list[str], error: str
) -> None:
    code = (
        "import sys; from torchtitan_lite.cli import main; "
        f"status = main({arguments!r}); sys.exit(10 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert error in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_prediction_imports_no_torch() -> None:
    code = (
        "import sys; from torchtitan_lite.cli import main; "
        f"status = main({[*SHORT]!r}); sys.exit(10 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
