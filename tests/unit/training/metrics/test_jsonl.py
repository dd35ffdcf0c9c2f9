import json
import logging
import os
import signal
import time

import pytest

from tests.harness.ranks import exit_status
from torchtitan_lite.training.metrics import Event
from torchtitan_lite.training.metrics.jsonl import JsonLines, rotate_file

KEYS = {
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "memory_gib"),
    *("step_time_s", "data_time_s", "checkpoint_stall_s", "num_replicas"),
    *("gc_time_s", "skipped", "num_target_tokens"),
    *("router_load", "idle_experts", "goodput", "time"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def write(path, make_record):
    def write(*steps, resume_step):
        lines = JsonLines(path, resume_step)
        for step in steps:
            lines.step(make_record(step))
        lines.close()

    return write


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path):
    return [values["step"] for values in read(path)]


def test_one_line_per_step_with_every_key(path, make_record):
    lines = JsonLines(path, 0)
    lines.step(make_record(1))
    lines.step(make_record(2, mfu=0.5))
    first, second = read(path)  # before close: every line has been passed to the operating system
    lines.close()
    assert first.keys() == second.keys() == KEYS
    assert (first["step"], first["loss"], first["mfu"], first["skipped"]) == (
        1,
        4.03125,
        None,
        False,
    )
    assert second["mfu"] == 0.5


def test_non_finite_values_become_null(path, make_record):
    lines = JsonLines(path, 0)
    lines.step(make_record(1, loss=float("nan"), grad_norm=float("inf"), skipped=True))
    lines.event(Event(name="skip", step=1, time=5.5, values={"losses": [float("-inf"), 2.0]}))
    lines.close()
    step, event = read(path)
    assert (step["loss"], step["grad_norm"], step["skipped"]) == (None, None, True)
    assert event == {"event": "skip", "step": 1, "time": 5.5, "losses": [None, 2.0]}
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


@pytest.mark.parametrize("key", ["event", "step", "time"])
def test_event_values_do_not_hide_the_events_own_fields(key):
    with pytest.raises(ValueError, match=key):
        Event(name="validation", step=3, values={key: 4})


def test_records_and_events_have_their_creation_time(path, make_record):
    before_s = time.time()
    lines = JsonLines(path, 0)
    lines.step(make_record(1))
    lines.event(Event(name="validation", step=1, values={"loss": 4.0}))
    lines.close()
    step, event = read(path)
    assert before_s <= step["time"] <= event["time"] <= time.time()


def test_resume_drops_only_later_records(path, write, make_record):
    lines = JsonLines(path, 0)
    lines.event(Event(name="resume", step=0, values={}))
    lines.close()
    with path.open("a") as file:
        file.writelines(make_record(step).to_json() + "\n" for step in (1, 2, 3, 4, 5))
    lines = JsonLines(path, 5)
    lines.event(Event(name="validation", step=5, values={"loss": 4.0}))
    lines.close()
    assert steps_in(path) == [0, 1, 2, 3, 4, 5, 5]
    write(4, 5, 6, resume_step=3)
    assert steps_in(path) == [0, 1, 2, 3, 4, 5, 6]
    assert list(path.parent.iterdir()) == [path]


def test_what_is_kept_is_durable_before_it_replaces_the_file(path, write, fsyncs):
    write(1, 2, 3, resume_step=0)
    write(resume_step=2)
    assert steps_in(path) == [1, 2]
    assert path.read_bytes() in fsyncs.synced.values()


def test_a_fresh_run_keeps_the_history_of_an_earlier_one(path, write):
    write(1, 2, 3, resume_step=0)
    write(1, 2, resume_step=0)
    write(1, resume_step=0)
    assert steps_in(path) == [1]
    assert steps_in(path.with_name("metrics.1.jsonl")) == [1, 2, 3]
    assert steps_in(path.with_name("metrics.2.jsonl")) == [1, 2]


@pytest.mark.parametrize("name", ["losses.csv", "losses.of.steps.csv", "losses"])
def test_an_earlier_file_keeps_its_suffix(tmp_path, name):
    path = tmp_path / name
    path.with_name(f"{path.stem}.1x{path.suffix}").touch()
    for content in ("first", "second"):
        path.write_text(content)
        rotate_file(path)
    for number, content in ((1, "first"), (2, "second")):
        kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
        assert kept.read_text() == content


def test_resume_with_nothing_to_drop_does_not_change_the_file(path, write):
    write(1, 2, resume_step=0)
    inode = path.stat().st_ino
    write(3, resume_step=2)
    assert path.stat().st_ino == inode
    assert steps_in(path) == [1, 2, 3]


def test_an_incomplete_last_line_is_dropped_and_named(path, write, caplog):
    write(1, 2, resume_step=0)
    full = path.read_bytes()
    path.write_bytes(full[:-20])
    with caplog.at_level(logging.WARNING, logger="torchtitan_lite"):
        write(2, resume_step=1)
    assert steps_in(path) == [1, 2]
    assert "line 2" in caplog.text


def test_a_last_line_without_a_newline_is_kept(path, write):
    write(1, 2, resume_step=0)
    path.write_bytes(path.read_bytes()[:-1])
    write(3, resume_step=2)
    assert steps_in(path) == [1, 2, 3]


def write_and_exit(path):
    lines = JsonLines(path, 0)
    for step in range(100):
        lines.event(Event(name="x", step=step, values={}))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_every_line_it_wrote(path):
    assert exit_status(write_and_exit, path) == -signal.SIGKILL
    assert steps_in(path) == list(range(100))
