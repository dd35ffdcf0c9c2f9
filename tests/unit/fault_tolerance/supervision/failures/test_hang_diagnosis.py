"""The report about ranks that are to be ended because one of them hangs."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchtitan_lite.core.rank import supervised
from torchtitan_lite.core.rank.processes import spawn
from torchtitan_lite.core.rank.supervised import rank_log
from torchtitan_lite.fault_tolerance.supervision.failures import hang_diagnosis
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import flight_record_file
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import RankStatus
from torchtitan_lite.fault_tolerance.supervision.failures.hang_diagnosis import (
    HangMonitor,
    MonitoredRanks,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure


def test_a_killed_diagnosis_has_ended() -> None:
    group: Any = None
    monitor = hang_diagnosis.HangMonitor(group)
    monitor._diagnosis = spawn(["sleep", "100"], dict(os.environ), stdout=subprocess.DEVNULL)
    pid = monitor.pid
    monitor.close()
    assert not Path(f"/proc/{pid}").exists() and monitor.pid is None


def test_flight_records_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before stacks are collected, which could crash a rank that is writing one."""
    order: list[str] = []
    monkeypatch.setattr(hang_diagnosis, "parent_of", lambda pid: 1)
    monkeypatch.setattr(hang_diagnosis, "request_flight_record", lambda pid: order.append("ask"))

    def has_record(folder: Path, rank: int, than_ns: int) -> bool:
        order.append("look")
        return len(order) > 3

    def stacks(ranks: Sequence[RankStatus], folder: Path) -> dict[int, str]:
        order.append("stacks")
        return {0: ""}

    monkeypatch.setattr(hang_diagnosis, "has_newer_flight_record", has_record)
    monkeypatch.setattr(hang_diagnosis, "_collect_stacks", stacks)
    request = json.loads(hang_diagnosis.diagnosis_request([RankStatus(0, 7, None, "S")], {0}, 1))
    hang_diagnosis.main(tmp_path, request)
    assert order[:5] == ["ask", "look", "look", "look", "stacks"]


@pytest.mark.parametrize(("mask", "is_sent"), [(0x100, False), (0x200, True), (0x400, False)])
def test_only_a_process_that_handles_a_signal_receives_it(
    mask: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would kill any other one."""
    sent: list[tuple[int, int]] = []
    status = f"SigBlk:\tffff\nSigCgt:\t{mask:016x}\n"
    monkeypatch.setattr(hang_diagnosis, "_read_proc", lambda pid, name: status)
    monkeypatch.setattr(hang_diagnosis, "signal_process", lambda *one: sent.append(one))
    assert hang_diagnosis._signal_if_expected(7, signal.Signals(10), "SigCgt") == is_sent
    assert sent == [(7, 10)] * is_sent


def test_stacks_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes some time to answer, and writes them piece by piece."""
    log = rank_log(tmp_path, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("before\n")
    pieces = ["", "", "", "first ", "second", "", "never read"]

    def sleep(seconds: float) -> None:
        with log.open("a") as file:
            file.write(pieces.pop(0))

    monkeypatch.setattr(hang_diagnosis, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0))
    monkeypatch.setattr(hang_diagnosis, "_signal_if_expected", lambda *_: True)
    found = hang_diagnosis._faulthandler_stacks([RankStatus(0, 7, None, "S")], tmp_path)
    assert found == {0: "first second"}


def test_a_flight_record_is_new_within_the_resolution_of_file_times(tmp_path: Path) -> None:
    path = flight_record_file(tmp_path, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    assert not hang_diagnosis.has_newer_flight_record(tmp_path, 3, 0)
    path.touch()
    written_ns = 10**18
    os.utime(path, ns=(written_ns, written_ns))
    for late_ns, is_new in ((0, True), (10**7, True), (10**7 + 1, False)):
        found = hang_diagnosis.has_newer_flight_record(tmp_path, 3, written_ns + late_ns)
        assert found == is_new


def test_a_rank_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a Python process, and py-spy is not installed."""
    monkeypatch.setattr(hang_diagnosis, "_ANSWER_S", 0.1)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    rank_log(tmp_path, 0).touch()
    with subprocess.Popen(["sleep", "100"]) as rank:
        ranks = [RankStatus(0, rank.pid, None, "S")]
        request = json.loads(hang_diagnosis.diagnosis_request(ranks, {0}, os.getpid()))
        examine = threading.Thread(
            target=hang_diagnosis.main, args=(tmp_path, request), daemon=True
        )
        examine.start()
        examine.join(10)
        rank.kill()
    assert not examine.is_alive()
    report = (tmp_path / hang_diagnosis.REPORT).read_text()
    assert f"rank 0, process {rank.pid}" in report
    assert "the rank did not write its flight record" in report
    assert "No stacks: no answer" in report


@pytest.mark.parametrize(
    ("status", "now_s", "is_over"), [(None, 14.9, False), (None, 15.0, True), (0, 1.0, True)]
)
def test_a_diagnosis_has_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, status: int | None, now_s: float, is_over: bool
) -> None:
    monitor = HangMonitor(cast("MonitoredRanks", None))
    diagnosis = SimpleNamespace(pid=4242, poll=lambda: status, wait=lambda: None)
    untyped: Any = monitor
    untyped._diagnosis, untyped._deadline_s = diagnosis, 15.0
    untyped._conclude = lambda now_s: Failure("it hangs", "", Path("log"), 0)
    killed: list[int] = []
    monkeypatch.setattr(hang_diagnosis, "kill_process_group", killed.append)
    failure = monitor.poll(now_s)
    assert (failure is not None, killed) == (is_over, [4242] if is_over else [])
    assert monitor.pid == (None if is_over else 4242)


def test_a_parent_that_lives_is_not_dying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_ADOPTED_WITHIN_S", 0.0)
    monkeypatch.setattr(supervised.time, "sleep", lambda _: pytest.fail("it waits longer"))
    assert not supervised._dies(os.getppid())
