"""The drawing of a config's pipeline schedule, and its widths."""

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from scripts.pipeline_chart import Chart, tick_step
from scripts.pipeline_svg import as_svg
from scripts.pipeline_text import as_text
from scripts.show_pipeline import main
from tests.unit.parallel.test_step_order import plan_of
from torchtitan_lite.parallel.pipeline_order import ActionCosts, simulate
from torchtitan_lite.parallel.pipeline_stages import step_order

SVG = "{http://www.w3.org/2000/svg}"
PP = ("--parallelism.pipeline_parallel_degree=2", "--training.global_batch_size=8")


def show(*arguments: str, status: int = 0) -> str:
    """Return the output of the command for the debug config."""
    environment = {"COLUMNS": "100"}
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        assert main(["--config=configs/llama3_debug.toml", *arguments]) == status, output.getvalue()
    return output.getvalue()


def chart_of(schedule: str, num_ranks: int, num_microbatches: int, costs: ActionCosts) -> Chart:
    plan = plan_of(schedule.lower(), num_ranks)
    order = step_order(plan, schedule, num_microbatches)
    return Chart(schedule, simulate(order, costs), plan.ranks, num_microbatches, "note")


def rows_of(text: str, name: str) -> str:
    """Return the parts of a rank's row, in order."""
    margin = len(name) + 2
    return "".join(line[margin:] for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_text_and_the_svg_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    text = show(*PP, f"--svg={file}", "--nproc=2")
    assert "1F1B: 2 ranks, 2 stages, 8 microbatches, bubble 11.1% of the ranks' time" in text
    assert rows_of(text, "rank 0").startswith("F0 F1 ......B0--- F2 B1--- ")
    assert rows_of(text, "rank 1").startswith("...F0 B0--- F1 B1--- ")
    assert "\x1b" not in text
    tree = ElementTree.parse(file).getroot()
    assert tree.tag == f"{SVG}svg"
    hints = [cell.text or "" for cell in tree.iterfind(f"{SVG}rect/{SVG}title")]
    assert len(hints) == 2 * 8 * 2
    assert "1B7: stage 1, backward, microbatch 7, time 23 to 25" in hints
    assert not list(tree.iter(f"{SVG}script"))


def test_the_order_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n")
    arguments = [PP[0], f"--parallelism.pipeline_parallel_schedule_csv={file}"]
    text = show(*arguments, "--training.global_batch_size=1", "--backward-weight", "2")
    assert "mine.csv: 2 ranks, 4 stages, 1 microbatch, bubble 50.0%" in text
    assert "times the stage's weight: 2, 2, 1, 1" in text


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ((), "pipeline_parallel_degree is 1, so there is no pipeline to draw. Set it in the file"),
        ((*PP, "--training.step=3"), "Did you mean training.steps"),
        ((*PP, "--nproc=3"), "but there are 3 processes"),
        ((*PP, "--svg=/no/such/folder/step.svg"), "cannot be written: No such file or directory"),
    ],
)
def test_errors_are_one_line(arguments: Sequence[str], needed: str) -> None:
    assert needed in show(*arguments, status=1)


@pytest.mark.parametrize("num_columns", [80, 133])
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches"),
    [("1F1B", 2, 4), ("ZBVZeroBubble", 4, 12), ("DualPipeV", 4, 64)],
)
def test_the_text_fits_the_terminal_width(
    schedule: str, num_ranks: int, num_microbatches: int, num_columns: int
) -> None:
    costs = ActionCosts(forward=1, backward_input=1.3, backward_weight=0.7)
    chart = chart_of(schedule, num_ranks, num_microbatches, costs)
    plain = as_text(chart, num_columns, in_color=False)
    rows = [line for line in plain.splitlines() if line.startswith(("rank", "time"))]
    assert max(map(len, rows)) <= num_columns
    colored = as_text(chart, num_columns, in_color=True)
    assert "\x1b[30;48;5;111m" in colored
    assert ("Too long for labels" in plain) == (num_microbatches == 64)
    if num_microbatches < 64:
        for rank, row in enumerate(chart.timeline.rows):
            shown = rows_of(plain, f"rank {rank}")
            assert sum(shown.count(kind) for kind in "FBIW") == len(row)


def test_an_svg_of_many_microbatches_fits_a_screen() -> None:
    chart = chart_of("Interleaved1F1B", 4, 128, ActionCosts())
    tree = ElementTree.fromstring(as_svg(chart))
    assert float(tree.attrib["width"]) < 2000
    assert len(list(tree.iterfind(f"{SVG}rect/{SVG}title"))) == 4 * 2 * 128 * 2


def test_axis_tick_distances() -> None:
    assert [tick_step(room) for room in (0.1, 1, 1.5, 3, 6, 11, 21, 60, 150)] == [
        1,
        1,
        2,
        5,
        10,
        20,
        50,
        100,
        200,
    ]
