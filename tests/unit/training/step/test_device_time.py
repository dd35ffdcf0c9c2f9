"""Time of a device's work, by events. Events are a stand-in: they hold the times at which a device
that lags behind the host would reach them."""

from typing import Any

import pytest
import torch

from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.phases import Phase, Phases
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.training.step import work_times as module
from torchtitan_lite.training.step.work_times import WorkTimes


class _Device:
    """A clock of the host, and a device that takes `backlog_s` to reach what is issued now."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.backlog_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def event(self, **options: Any) -> "_Event":
        return _Event(self)


class _Event:
    def __init__(self, device: _Device) -> None:
        self._device = device
        self.reached_s = 0.0

    def record(self) -> None:
        self.reached_s = self._device.now_s + self._device.backlog_s

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds."""
        return (end.reached_s - self.reached_s) * 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    made = _Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def times(device: _Device) -> WorkTimes:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        made = WorkTimes(mesh, 0)
        made._on_gpu = True
        made._began = made._ended = made._now()
        made._anchor = (made._began, device.perf_counter())
        return made


def test_the_end_of_the_devices_work_is_known_on_the_hosts_clock(
    device: _Device, times: WorkTimes
) -> None:
    for lag_s in (0.0, 0.25):
        # The optimizer of the previous step still runs when this step begins.
        device.backlog_s = lag_s
        times.begin()
        device.now_s += 0.125
        device.backlog_s = 2.0
        times.end()
        ended_s = device.now_s + 2.0
        # The device waits 0.5 s for other ranks, and the host for the device, which then updates
        # the weights.
        device.backlog_s += 0.5
        times.mark_reduction()
        device.now_s, device.backlog_s = ended_s + 0.5, lag_s
        times.mark_totals()
        # The replicas vote.
        device.now_s += 0.0625
        assert times.device_ended_ago_s() == pytest.approx(0.5)
        device.now_s += 1.0


def test_a_cpu_has_no_work_behind_the_host() -> None:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        times = WorkTimes(mesh, 0)
        times.begin()
        times.end()
        assert times.device_ended_ago_s() is None


def test_only_listeners_of_device_time_are_notified() -> None:
    class Listener:
        def entered(self, phase: Phase, step: int) -> None:
            pass

    class DeviceListener(Listener):
        def device_worked(self, phase: Phase, ended_ago_s: float) -> None:
            received.append((phase, ended_ago_s))

    received: list[tuple[Phase, float]] = []
    Phases([Listener(), DeviceListener()]).device_worked(Phase.COMPUTE, 0.5)
    assert received == [(Phase.COMPUTE, 0.5)]
