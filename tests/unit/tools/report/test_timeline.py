import json

import pytest

from tests.unit.tools.report.conftest import START, event, record, write_metrics
from torchtitan_lite.tools.report import read_run
from torchtitan_lite.tools.report.timeline import timeline


def kinds(found, lane):
    return [one.kind for one in found.marks if one.lane == lane]


def test_a_fault_and_the_recovery_of_a_replica(replicas):
    actual = timeline(read_run(replicas))
    assert actual.lanes == ("replica 0", "replica 1", "replica 1, rank 1")
    assert kinds(actual, "replica 0") == ["aborted", "saved"]
    assert kinds(actual, "replica 1") == ["fault", "restart", "healed"]
    assert kinds(actual, "replica 1, rank 1") == ["slow_rank"]
    spans = [
        (one.kind, round(one.start - START, 2), round(one.end - START, 2))
        for one in actual.spans
        if one.lane == "replica 1"
    ]
    assert spans == [
        ("starting", 0.6, 10.0),
        ("training", 10.0, 12.25),
        ("down", 12.25, 12.75),
        ("starting", 12.75, 13.0),
        ("training", 13.0, 14.0),
    ]
    assert actual.first_time == START + 0.5


def test_a_recovery_has_its_reason_and_its_duration(replicas):
    (actual,) = timeline(read_run(replicas)).recoveries
    assert (actual.replica, actual.reason) == (1, "rank 0: killed by SIGKILL")
    assert (actual.failed_after, actual.resumed_at) == (2, 4)
    assert actual.seconds == pytest.approx(0.75)


def test_generations_without_a_launcher(tmp_path):
    lines = [
        record(1),
        event("start", 0, 11.0, process_age_s=5.0),
        record(2),
        event("resume", 2, 30.0, folder="checkpoint/step-2"),
        record(3, time=START + 33),
        event("start", 2, 33.0, process_age_s=10.0),
    ]
    write_metrics(tmp_path / "metrics.jsonl", lines)
    actual = timeline(read_run(tmp_path))
    assert [(one.kind, one.start - START, one.end - START) for one in actual.spans] == [
        ("starting", 6, 10),
        ("training", 10, 12),
        ("down", 12, 23),
        ("starting", 23, 32),
        ("training", 32, 33),
    ]
    assert kinds(actual, "leader") == ["restart", "resume"]


def test_skipped_steps_are_marked_once(tmp_path):
    rejected = event("refused", 1, 12.0, action="skip", reason="is not finite")
    write_metrics(tmp_path / "a" / "metrics.jsonl", [record(1), record(2, skipped=True), rejected])
    write_metrics(tmp_path / "b" / "metrics.jsonl", [record(1), record(2, skipped=True)])
    for name in "ab":
        actual = timeline(read_run(tmp_path / name))
        assert kinds(actual, "leader") == ["skipped"]


def test_unknown_events_are_shown_by_name(tmp_path):
    lines = [record(1), event("brand_new", 1, 12.0, where="here", count=3)]
    write_metrics(tmp_path / "metrics.jsonl", lines)
    (mark,) = timeline(read_run(tmp_path)).marks
    assert (mark.kind, mark.text) == ("other", "brand_new: where here, count 3")


def test_records_without_times_have_marks_by_step(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"event": "validation", "step": 1, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    actual = timeline(read_run(tmp_path))
    assert actual.first_time is None and not actual.spans
    assert [(one.kind, one.step) for one in actual.marks] == [("validation", 1)]


def test_many_marks_of_one_kind_are_thinned(tmp_path):
    lines = [event("validation", step, step, loss=1.0) for step in range(1, 2501)]
    write_metrics(tmp_path / "metrics.jsonl", [record(1), event("error", 1, 1.0), *lines])
    actual = timeline(read_run(tmp_path))
    shown = kinds(actual, "leader")
    assert shown.count("error") == 1 and 800 <= shown.count("validation") <= 1000
    assert len(actual.marks) + actual.num_thinned == 2501
