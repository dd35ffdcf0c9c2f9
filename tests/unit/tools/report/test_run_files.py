import json
import math
from pathlib import Path

import pytest

from tests.unit.tools.report.conftest import START, record, write_metrics
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.tools.report.run_files import read_run, unique_labels


def test_a_run_is_read_as_it_was_written(make_run):
    run = read_run(make_run())
    assert run.label == "run" and not run.problems
    assert [one.step for one in run.merged] == [1, 2, 3, 4]
    assert run.merged[2]["loss"] == 7.7 and run.merged[2]["mfu"] == 0.4
    assert run.setting("training", "steps") == 4
    (goodput,) = run.goodput
    assert (goodput.goodput, goodput.wall_s, goodput.seconds["start"]) == (0.8, 10.0, 2.0)


def test_replicas_and_ranks_have_separate_streams(replicas):
    run = read_run(replicas)
    assert [one.label for one in run.streams] == ["replica 0", "replica 1", "replica 1, rank 1"]
    assert [one.step for one in run.merged] == [1, 2, 3, 4]
    assert [one.replica for one in run.goodput] == [0, 1]
    assert [one.values["replica"] for one in run.launcher_events] == [None, None, 0, 1, 1, 1]
    assert run.setting("model", "name") == "llama3"


def test_launchers_of_earlier_runs_are_ignored(replicas):
    path = replicas / "launch_logs" / "events.jsonl"
    assert len(path.read_text().splitlines()) == 8
    times = [one.time or 0.0 for one in read_run(replicas).launcher_events]
    assert times == sorted(times) and times[0] == START


def test_the_last_record_of_a_repeated_step_counts(tmp_path):
    lines = [record(1), record(2, skipped=True, loss=99.0), record(2), record(3), record(2, loss=1)]
    write_metrics(tmp_path / "metrics.jsonl", lines)
    run = read_run(tmp_path)
    assert [(one.step, one["loss"]) for one in run.merged] == [(1, 7.9), (2, 1), (3, 7.7)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON object"),
        ("[1]", "a JSON list"),
        ('{"step": 1, "loss": NaN}', "NaN"),
        ('{"step": "1"}', "step must be an integer"),
        ('{"step": true}', "step must be an integer"),
        ('{"step": -1}', "step must be an integer"),
        ('{"loss": 1.0}', "step must be an integer"),
        ('{"step": 1, "loss": "<script>"}', "loss must be a number or null"),
        ('{"step": 1, "loss": 1e999}', "loss is too large"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "loss is too large"),
        ('{"step": 1, "loss": 1' + "0" * 5000 + "}", "not a JSON object"),
        ('{"step": 1, "time": -5}', "time must be Unix time"),
        ('{"step": 1, "time": 1e30}', "time must be Unix time"),
        ('{"step": 1, "skipped": 1}', "skipped must be true or false"),
        ('{"step": 1, "router_load": [1]}', "router_load must be an object"),
        ('{"step": 1, "router_load": {"a": "b"}}', "router_load.a must be a number"),
        ('{"step": 1, "event": 5}', "event must be a string"),
        ('{"step": 1, "mfu": 1e308}', "mfu is too large"),
        ('{"step": 1, "time": 253402300800}', "time must be Unix time"),
        ('{"step": 1, "event": "validation", "loss": 1e999}', "loss is too large"),
        ('{"step": 1, "event": "validation", "loss": 1' + "0" * 400 + "}", "loss is too large"),
        ('{"step": 1, "event": "x", "a": [{"b": -1e999}]}', "a.b is too large: -Infinity"),
        ('{"step": 1, "event": "x", "a": ' + "[" * 40 + "]" * 40 + "}", "32 levels of nesting"),
        ("[" * 100_000, "not a JSON object"),
        ("\udcff\udcfe", "not a JSON object"),
    ],
)
def test_a_malformed_line_is_named_and_skipped(make_run, line, problem):
    folder = make_run()
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(2, line.encode(errors="surrogateescape") + b"\n")
    path.write_bytes(b"".join(lines))
    run = read_run(folder)
    (actual,) = run.problems
    assert f"{path}:3: " in actual and problem in actual and "skipped" in actual
    assert [one.step for one in run.merged] == [1, 2, 3, 4]


def test_an_incomplete_last_line_is_reported_as_such(make_run):
    folder = make_run()
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(folder)
    assert "metrics.jsonl:4: " in run.problems[0] and "incomplete" in run.problems[0]
    assert len(run.merged) == 3


def test_the_list_of_problems_is_limited(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x\n" * 1000)
    problems = read_run(folder).problems
    assert len(problems) == 201 and problems[-1] == "and 800 more problems"


def test_files_without_newer_keys_stay_readable(tmp_path):
    lines = [json.dumps({"step": step, "loss": 2.0, "grad_norm": None}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert not run.problems and not run.goodput
    assert [(one["loss"], one["time"]) for one in run.merged] == [(2.0, None)] * 2


def test_rotated_files_are_ignored(make_run):
    folder = make_run()
    write_metrics(folder / "metrics.1.jsonl", [record(step) for step in range(1, 100)])
    run = read_run(folder)
    assert len(run.streams) == 1 and len(run.merged) == 4


@pytest.mark.parametrize("content", ["", "{", '{"goodput": 1}', '{"goodput": "a", "wall_s": 1}'])
def test_a_damaged_goodput_file_is_named(make_run, content):
    folder = make_run()
    (folder / "goodput.json").write_text(content)
    run = read_run(folder)
    assert not run.goodput
    assert "goodput.json" in run.problems[0]


def test_a_damaged_config_is_named(make_run):
    run = read_run(make_run(config="[job\n"))
    assert "config.toml: not a TOML file" in run.problems[0]
    assert run.config == {} and run.config_text == "[job\n"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[training]\nsteps = 0x" + "f" * 5000, "training.steps is too large"),
        ("a." * 500 + "a = 1", "32 levels of nesting"),
    ],
)
def test_a_config_with_oversized_values_is_named(make_run, config, problem):
    run = read_run(make_run(config=config))
    assert "config.toml: " in run.problems[0] and problem in run.problems[0]
    assert run.config == {} and run.config_text == config


def test_a_config_may_have_non_finite_values(make_run):
    run = read_run(make_run(config="[training]\nmax_norm = inf\n"))
    assert run.setting("training", "max_norm") == math.inf and not run.problems


def test_an_unreadable_folder_is_one_clear_error(make_run, monkeypatch):
    folder = make_run()

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(UserError, match="run cannot be read: .*Permission denied") as raised:
        read_run(folder)
    assert "\n" not in str(raised.value)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist") as raised:
        read_run(tmp_path / "nowhere")
    assert "\n" not in str(raised.value)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a folder"):
        read_run(tmp_path / "file")
    with pytest.raises(UserError, match=r"metrics.jsonl and replica_NNN/metrics.jsonl do not"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("what\n")
    with pytest.raises(UserError, match=r"no valid record.*metrics.jsonl:1"):
        read_run(tmp_path)


def test_labels_differ(make_run):
    runs = [read_run(folder) for folder in (make_run("a/run"), make_run("b/run"), make_run("c"))]
    assert [one.label for one in unique_labels(runs)] == ["a/run", "b/run", "c"]
    assert [one.label for one in unique_labels([runs[0]] * 2)] == ["a/run", "a/run (2)"]
