"""What the launcher does once it was asked to stop, without processes."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.fault_tolerance.supervision.launcher import launcher as module
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import PlainLines


class _Parts:
    """Everything that the launcher polls: a lighthouse, a replica, and more. Records calls."""

    address, pid, pids, number = "127.0.0.1:1", None, (), 0
    is_listening, is_over, is_training, state = True, False, False, None
    num_orphans, has_writer, mesh = 0, False, None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.given_up: Any = None
        self.rank_pids: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)

    def reap(self, started: object, now_s: float) -> None:
        """Nothing has ended."""


def _launcher(folder: Path, grace_s: float = 60.0) -> tuple[Any, _Parts]:
    plan = LaunchPlan(
        num_replicas=1,
        ranks=[1],
        process_command=lambda replica: [],
        lighthouse_command=lambda address: [],
        dump_folder=folder,
        log_dir=folder,
        grace_s=grace_s,
        is_pipelined=lambda mesh: False,
    )
    launcher: Any = Launcher(plan, PlainLines())
    parts = _Parts()
    launcher._replicas, launcher._lighthouse = [parts], parts
    launcher._links = SimpleNamespace(poll=lambda *_, **__: [])
    for name in ("_resizer", "_notifier", "_view", "_subreaper"):
        setattr(launcher, name, parts)
    return launcher, parts


@pytest.mark.parametrize("is_stopping", [False, True])
def test_nothing_starts_after_a_request_to_stop(tmp_path: Path, is_stopping: bool) -> None:
    launcher, _ = _launcher(tmp_path)
    if is_stopping:
        launcher._deadline_s = time.monotonic() + 60
    started: list[int] = []
    launcher._start_replicas = lambda: started.append(1)
    launcher._poll()
    assert (started == [1]) is not is_stopping


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_run_that_stops_is_neither_resized_nor_stopped_again(
    tmp_path: Path, is_stopping: bool
) -> None:
    launcher, parts = _launcher(tmp_path)
    launcher._has_started = True
    parts.given_up = SimpleNamespace(others_continue=False)
    deadline_s = time.monotonic() + 30 if is_stopping else None
    launcher._deadline_s = deadline_s
    resizes: list[int] = []
    launcher._resizer = SimpleNamespace(
        mesh=None, pids=(), poll=lambda *_: resizes.append(1), end=lambda reason: None
    )
    launcher._poll()
    assert (resizes == [1]) is not is_stopping
    assert (parts.calls.count("stop") == 1) is not is_stopping
    assert not is_stopping or launcher._deadline_s == deadline_s


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_notifier_may_end_with_a_run_that_stops(tmp_path: Path, is_stopping: bool) -> None:
    launcher, parts = _launcher(tmp_path)
    launcher._notifier = SimpleNamespace(poll=lambda *_: "it has died")
    launcher._deadline_s = time.monotonic() + 60 if is_stopping else None
    launcher._poll_notifier(time.monotonic())
    assert ("report_diagnosis" in parts.calls) is not is_stopping


@pytest.mark.parametrize(("grace_s", "signals"), [(0.0, []), (60.0, [signal.SIGINT])])
def test_waiting_for_checkpoint_writers_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, signals: list[int]
) -> None:
    launcher, parts = _launcher(tmp_path, grace_s)
    launcher._subreaper = SimpleNamespace(num_orphans=1, has_writer=True, reap=lambda *_: None)
    launcher._signals = signals
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("it waits longer"))
    launcher._wait_for_orphans()
    assert parts.calls == ["report_event"]
