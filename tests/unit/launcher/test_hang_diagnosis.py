"""The report about ranks that are to be ended because one of them hangs."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.launcher import hang_diagnosis
from torchtitan_lite.launcher.hang_detection import RankStatus
from torchtitan_lite.launcher.processes import spawn
from torchtitan_lite.launcher.supervised import rank_log


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
