import json
from pathlib import Path

import pytest

from torchtitan_lite import cli


def main(argv: list[str]) -> int:
    return cli.main(["report", *argv])


def test_the_page_is_written_next_to_the_run(make_run, capsys):
    folder = make_run()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"Wrote {folder / 'report.html'}\n"
    first = (folder / "report.html").read_text()
    assert first.startswith("<!DOCTYPE html>")
    # Again, replacing the first one.
    assert main([str(folder)]) == 0
    assert (folder / "report.html").read_text() == first
    assert not list(folder.glob("*.tmp"))


def test_the_page_can_be_written_elsewhere(make_run, tmp_path):
    assert main([str(make_run()), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


@pytest.mark.parametrize(("limit", "status"), [("0", 1), ("0.1", 1), ("0.5", 0), ("1e9", 0)])
def test_fail_above(make_run, capsys, limit, status):
    runs = [make_run("a"), make_run("b"), make_run("c", changes={3: {"grad_norm": 0.25}})]
    assert main([*map(str, runs), "--fail-above", limit]) == status
    written, verdict = capsys.readouterr().out.splitlines()
    assert written.startswith("Wrote ")
    if status:
        assert verdict.startswith("FAILED: gradient norm of c differs from a by 0.25 (relative)")
        assert "at step 3: 0.25 and 0.333333" in verdict
    else:
        assert verdict.startswith("OK: ")


def test_fail_above_without_common_steps(make_run, capsys):
    other = make_run("b")
    path = other / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": ', '"step": 9'))
    assert main([str(make_run("a")), str(other), "--fail-above", "9"]) == 1
    assert "FAILED: b and a have no step in common" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "other_steps"), [(4, 2), (2, 4)])
def test_fail_above_with_a_run_that_ends_early(make_run, capsys, steps, other_steps):
    runs = [make_run("a", steps=steps), make_run("b", steps=other_steps)]
    assert main([*map(str, runs), "--fail-above", "9"]) == 1
    _, verdict = capsys.readouterr().out.splitlines()
    ends = f"the last committed step of b is {other_steps}, that of a is {steps}"
    assert verdict == f"FAILED: {ends}; --fail-above is 9"
    assert ends in (runs[0] / "report.html").read_text()


def test_a_non_finite_value_on_one_side_fails(make_run, capsys):
    runs = [make_run("a"), make_run("b", changes={2: {"loss": float("nan")}})]
    assert main([*map(str, runs), "--fail-above", "1e300"]) == 1
    assert "by inf (relative) at step 2: not finite and 7.8" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["-1", "nan"])
def test_an_invalid_limit_is_rejected(make_run, capsys, limit):
    runs = [str(make_run("a")), str(make_run("b"))]
    assert main([*runs, f"--fail-above={limit}"]) == 2
    assert "must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "checkpoint", "checkpoint/step-8"])
def test_a_run_is_named_by_its_checkpoints_too(make_run, below):
    run = make_run()
    (run / "checkpoint" / "step-8").mkdir(parents=True)
    assert main([str(run / below)]) == 0
    assert (run / "report.html").is_file()


def test_another_folder_of_a_run_is_not_the_run(make_run, capsys):
    run = make_run()
    (run / "tb").mkdir()
    assert main([str(run / "tb")]) == 2
    assert "is not the dump folder of a run" in capsys.readouterr().err


def test_fail_above_needs_two_runs(make_run, capsys):
    assert main([str(make_run()), "--fail-above", "0"]) == 2
    assert "two or more" in capsys.readouterr().err


def test_missing_files_are_one_clear_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert shown.err.startswith(f"report: {tmp_path} is not the dump folder of a run")
    assert not list(tmp_path.iterdir())


def test_an_unwritable_page_is_one_clear_error(make_run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([str(make_run()), "--output", str(tmp_path / "file" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("report: The report cannot be written to ")


HUGE = int("1" + "0" * 399)


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "validation", "step": 4, "loss": 1e999}',
        json.dumps({"event": "validation", "step": 4, "loss": HUGE}),
        json.dumps({"event": "start", "step": 0, "time": 1.0, "parameters": HUGE}),
        json.dumps({"event": "start", "step": 0, "time": 1.0, "process_age_s": HUGE}),
        json.dumps({"step": 5, "mfu": 1e308}),
        json.dumps({"step": 5, "time": 3e11}),
        json.dumps({"event": "other", "step": 4, "time": 3e11}),
    ],
)
def test_a_line_with_an_oversized_number_is_skipped(make_run, capsys, line):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main([str(folder)]) == 0
    shown = capsys.readouterr().err
    assert "1 problem in the files" in shown and "metrics.jsonl:5: " in shown


def test_lone_surrogates_are_replaced(make_run, capsys):
    folder = make_run()
    lone = "\ud800"
    lines = [
        {"event": f"odd {lone}", "step": 4, "time": 20.0, f"key {lone}": [lone, {lone: lone}]},
        {"event": "error", "step": 4, "time": 20.0, "reason": f"a {lone}"},
        {"step": 4, "loss": 1.0, "router_load": {f"layer {lone}": 1.0}},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "goodput.json").write_text(json.dumps({"goodput": 1, "wall_s": 1, f"{lone}_s": 1}))
    # The surrogate of a folder name that is not UTF-8.
    folder = folder.rename(Path(f"{folder}\udcff"))
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "reason a ?" in page and "key ?" in page and "run?" in page
    assert "\\ud800" not in page and "\\udcff" not in page
    assert capsys.readouterr().out == f"Wrote {folder.with_name('run?')}/report.html\n"


def test_an_event_at_the_unix_epoch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "error", "step": 1, "time": 0}\n')
    assert main([str(tmp_path)]) == 0


def test_malformed_lines_are_counted(make_run, capsys):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    assert main([str(folder)]) == 0
    shown = capsys.readouterr().err
    assert "1 problem in the files" in shown and "metrics.jsonl:5: " in shown


def test_a_missing_plotly_is_one_clear_error(make_run, monkeypatch, capsys):
    monkeypatch.setattr("torchtitan_lite.core.optional_dependencies.find_spec", lambda name: None)
    folder = make_run()
    assert main([str(folder)]) == 2
    shown = capsys.readouterr().err
    assert "pip install plotly" in shown and "[report]" in shown
    assert len(shown.splitlines()) == 1 and not (folder / "report.html").exists()
