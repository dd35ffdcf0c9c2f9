"""The generated page of the failure model, and the figures that come from benchmark results."""

import json
from pathlib import Path

import pytest

from scripts.benchmark_page import RESULTS, Result, read_results
from scripts.failure_figures import MODULE, ORIGINS, measurements, module_text
from scripts.failure_page import (
    PAGE,
    PICTURE,
    page,
    page_comparisons,
    page_predictions,
    picture,
    validation,
)
from torchtitan_lite.tools.failure_model import Scenario, described


def test_the_figures_are_up_to_date() -> None:
    assert MODULE.read_text() == module_text(measurements(read_results(RESULTS))), "run `make docs`"


@pytest.mark.matrix
def test_the_page_and_its_picture_are_up_to_date() -> None:
    results, predictions = read_results(RESULTS), page_predictions()
    assert PAGE.read_text() == page(predictions, results, page_comparisons()), "run `make docs`"
    assert PICTURE.read_text() == picture(predictions), "run `make docs`"


def test_every_measured_input_has_an_origin() -> None:
    measured = [name for name, _, source in described(Scenario()) if source.startswith("measured:")]
    assert measured == list(ORIGINS)


def test_rates_are_computed_from_the_bytes_of_a_case(tmp_path: Path) -> None:
    results = dict(read_results(RESULTS))
    rows = [dict(row) for row in results["checkpoint"].rows]
    for row in rows:
        if row["case"] == "1 proc, 474 MB" and row["metric"].startswith("load, cold"):
            row["ours"] = 2.0
        if row["case"] == "1 proc, 474 MB" and row["metric"].startswith("bytes read, unique"):
            row["floor"] = 1 << 30
        if row["case"] == "1 proc, 474 MB" and row["metric"].startswith("extra wall of a save, t"):
            row["ours"] = 0.25
    found = measurements(results | {"checkpoint": Result("checkpoint", rows, None)})
    assert found["load_mib_per_s"][0] == 512
    assert found["save_s_per_gib"][0] == 0.25
    assert (
        "checkpoint.json, 1 proc, 474 MB, load, cold, readinto, ours" in found["load_mib_per_s"][1]
    )


def test_a_missing_row_is_named() -> None:
    with pytest.raises(LookupError, match=r"rank_recovery.json has no row '1 of 4 ranks killed"):
        measurements({})


def test_the_agreement_with_real_runs_is_that_of_the_result_file(tmp_path: Path) -> None:
    assert "has been recorded yet" in validation(None)
    row = {"case": "2 ranks, x", "metric": "lost time of 5 kills; peer: predicted", "unit": "s"}
    rows = [{**row, "ours": 10.4, "peer": 10.0, "met": True}]
    text = validation(Result("failures", json.loads(json.dumps(rows)), {"machine": "M"}))
    assert "| 2 ranks, x, lost time of 5 kills | 10.4 s | 10.0 s | +4.0 % |" in text
    assert "Machine: M." in text and "is met in this run" in text
    rows.append({**row, "ours": 9.0, "peer": 10.0, "met": True})
    assert "is missed in this run" in validation(Result("failures", rows, None))
