"""The command that explains a redistribution plan."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.explain_reshard import main

SVG = "{http://www.w3.org/2000/svg}"
SRC, DST = "mesh=dp:2,tp:2 placements=S0,R", "mesh=dp:4 placements=S1"


def run_script(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Return the output of the command, or its errors if it fails."""
    assert main(list(arguments)) == status
    printed = capsys.readouterr()
    assert not (printed.err if status == 0 else printed.out)
    return printed.out if status == 0 else printed.err


def between(src: str, dst: str, shape: str) -> list[str]:
    return ["--shape", shape, "--src", src, "--dst", dst]


def classes(file: Path) -> list[str]:
    """Return the classes of the boxes in a drawing."""
    tree = ElementTree.parse(file).getroot()
    assert not list(tree.iter(f"{SVG}script"))
    return [name for rect in tree.iter(f"{SVG}rect") if (name := rect.get("class"))]


def test_text_and_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "moved.svg"
    text = run_script(capsys, *between(SRC, DST, "64x128"), "--dtype=bfloat16", f"--svg={file}")
    assert "From: [S0, R] on (dp 2 x tp 2)\nTo: [S1] on (dp 4)" in text
    # Each of 4 holders keeps half of its quarter of 16384 bytes.
    assert "Total moved: 8,192 bytes (8 KiB); that is the lower bound." in text
    actual = classes(file)
    assert actual.count("source") == 2 and actual.count("destination") == 4
    # Half of each part stays; the other half arrives in two stripes or from two holders.
    assert actual.count("part") == 4 * 3


@pytest.mark.parametrize(
    ("src", "dst", "shape", "boxes"),
    [
        ("mesh=a:2 placements=S0/3", "mesh=b:1 placements=R", "12x4", (6, 1)),
        ("mesh=a:2,b:8 placements=P,S1", "mesh=a:4,b:4 placements=S0,R", "64x64", (8, 4)),
        ("mesh=a:2 placements=S2", "mesh=a:2 placements=S0 ranks=1-2", "4x4x4", (1, 2)),
        ("mesh=a:2 placements=S0", "mesh=a:2 placements=R", "7", (2, 1)),
        ("mesh=a:2 placements=P", "mesh=a:2 placements=R", "scalar", (1, 1)),
        ("mesh=a:32 placements=S0", "mesh=a:32 placements=S1", "64x64", (32, 32)),
        ("mesh=a:2 placements=S0", "mesh=a:2 placements=R", "0x3", (0, 0)),
    ],
)
def test_every_box_is_drawn_once(
    src: str,
    dst: str,
    shape: str,
    boxes: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "moved.svg"
    run_script(capsys, *between(src, dst, shape), f"--svg={file}")
    actual = classes(file)
    assert (actual.count("source"), actual.count("destination")) == boxes


def test_numbers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    actual = json.loads(run_script(capsys, *between(SRC, DST, "64x128"), "--json"))
    assert actual["moved_bytes"] == actual["lower_bound_bytes"] == 16384
    assert actual["rounds"] == ["move"] and actual["dtype"] == "float32"
    assert sum(holder["sent"] for holder in actual["holders"].values()) == 16384


@pytest.mark.parametrize(
    ("src", "dst", "shape", "needed"),
    [
        # gloo's DTensor gathers the tensor to keep a part: 4 ranks send their 4096 bytes to 3
        # others.
        ("mesh=a:4 placements=S0", "mesh=a:4 placements=S1", "64x64", ("49,152 bytes", "4 times")),
        # For reduce-scatter, gloo reduces everything: measured with 4 ranks.
        ("mesh=a:4 placements=P", "mesh=a:4 placements=S0", "64x64", ("98,304 bytes", "2 times")),
        (SRC, DST, "64x64", ("not supported: Cross device mesh",)),
        (
            "mesh=dp:4 placements=S0",
            "mesh=dp:2 placements=S0",
            "64x64",
            ("not supported: for equal placements on another mesh",),
        ),
        (
            "mesh=dp:2 placements=R",
            "mesh=dp:2 placements=R ranks=2-3",
            "64x64",
            ("not supported: for equal placements on another mesh",),
        ),
        ("mesh=a:2 placements=R", "mesh=a:2 placements=P", "4", ("not supported: Can not",)),
        (
            "mesh=a:2,b:2 placements=S0#1,S0#0",
            "mesh=a:2,b:2 placements=R,R",
            "23x3",
            ("every rank gets its part",),
        ),
        (
            "mesh=a:2,b:2 placements=S0/3,S0",
            "mesh=a:2,b:2 placements=R,R",
            "23x3",
            ("WRONG: checked with data",),
        ),
    ],
)
def test_dtensor_comparison(
    src: str, dst: str, shape: str, needed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_script(capsys, *between(src, dst, shape), "--torch")
    for words in needed:
        assert words in text


@pytest.mark.parametrize(
    ("src", "more", "needed"),
    [
        ("mesh=dp:2,tp:2", (), 'placements must be given, as in "mesh=dp:2,tp:2 placements=S0,R"'),
        ("mesh=dp placements=S0", (), '"dp" in mesh must be an axis and its size'),
        ("mesh=dp:2 placements=S0,R", (), "2 placements S0,R for 1 axis (dp 2)"),
        ("mesh=dp:2 placements=X0", (), '"X0" in placements must be R, S0, S0/2, S0#1'),
        ("mesh=dp:4 placements=R ranks=0-2", (), "needs 4 ranks, and ranks=0-2 gives 3"),
        ("mesh=dp:2 placements=R ranks=1,1", (), "Holder 1 is twice"),
        ("mesh=a:2,b:2 placements=S0#0,S0#0", (), "Two shards of dim 0 are both #0"),
        ("mesh=a:2,b:2 placements=S0#1,S0#2", (), "must be #0 to #1"),
        ("mesh=dp:2 placements=S2", (), "has 2 dims"),
        ("mesh=dp:2 placement=S0", (), '"placement=S0" must be mesh='),
        ("mesh=dp:2 placements=P(mean)", (), "one of sum, avg"),
        (SRC, ("--shape=4,4",), '--shape "4,4" must be lengths'),
        (SRC, ("--dtype=bf17",), '--dtype "bf17" must be a dtype of torch'),
        (SRC, ("--transport=pigeon",), "invalid choice: 'pigeon'"),
        (SRC, ("--svg=/no/such/folder/a.svg",), "cannot be written: No such file or directory"),
    ],
)
def test_errors_are_one_line(
    src: str, more: tuple[str, ...], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_script(capsys, *between(src, DST, "8x8"), *more, status=2)
    assert needed in output
    assert len(output.splitlines()) == 1


@pytest.mark.matrix
def test_too_large_drawings_are_rejected_early(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "large.svg"
    layouts = between("mesh=a:2 placements=S0/20000", DST, "100000x8")
    assert "boxes, and at most" in run_script(capsys, *layouts, f"--svg={file}", status=2)
    assert not file.exists()
