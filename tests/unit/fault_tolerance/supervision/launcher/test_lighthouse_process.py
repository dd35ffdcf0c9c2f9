"""The lighthouse of a launcher is restarted after its delay, and ends before its pipes close."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.fault_tolerance.supervision.launcher import lighthouse_process as module
from torchtitan_lite.fault_tolerance.supervision.launcher.lighthouse_process import (
    LighthouseProcess,
)


def _lighthouse(**values: Any) -> Any:
    lighthouse: Any = object.__new__(LighthouseProcess)
    vars(lighthouse).update(values)
    return lighthouse


def test_a_lighthouse_is_restarted_when_its_delay_is_over() -> None:
    starts: list[str] = []
    lighthouse = _lighthouse(_restart_at_s=5.0, num_restarts=0, _process=None)
    lighthouse.start = lambda: starts.append("start")
    for now_s, num_restarts in ((4.9, 0), (5.0, 1), (6.0, 1)):
        lighthouse.poll(now_s)
        assert lighthouse.num_restarts == len(starts) == num_restarts


def test_a_killed_lighthouse_has_ended_before_its_pipes_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(module, "kill_process_group", lambda pid: order.append(f"kill {pid}"))
    process = SimpleNamespace(pid=7, wait=lambda: order.append("wait"))
    lighthouse = _lighthouse(_restart_at_s=5.0, _process=process)
    lighthouse._close = lambda: order.append("close")
    lighthouse.kill()
    assert order == ["kill 7", "wait", "close"] and lighthouse._restart_at_s is None
