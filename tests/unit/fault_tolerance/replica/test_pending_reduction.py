"""Completion of reductions that torchft has wrapped. The group is torchft's gloo group; its works
are wrapped as torchft wraps those of NCCL, which needs a GPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.manager import _ManagedWork
from torchft.process_group import ProcessGroupGloo, _WorkAcceleratorTimeout

from tests.harness.launch import wait_until
from tests.unit.conftest import RecordedStreams
from torchtitan_lite.fault_tolerance.replica.torchft_manager import (
    PendingHostReduction,
    PendingReduction,
    QuorumManager,
    _GlooAtAddress,
)

_TIMEOUT = timedelta(seconds=60)


def test_a_wrapped_reduction_reports_completion() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [ProcessGroupGloo(_TIMEOUT) for _ in range(2)]
    address = f"127.0.0.1:{store.port}/test"
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda place: groups[place].configure(address, f"r{place}", place, 2), range(2)
            )
        )
    flats = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    works = [groups[0].allreduce([flats[0]], dist.AllreduceOptions())]
    pending = _wrapped(groups[0], works[0], flats[0])
    time.sleep(0.2)
    assert not pending.is_done(), "the other rank has not called yet"
    works.append(groups[1].allreduce([flats[1]], dist.AllreduceOptions()))
    wait_until(pending.is_done, 30)
    for work in works:
        work.wait()
    assert [flat.tolist() for flat in flats] == [[3.0] * 4] * 2
    # Needed as long as torchft's wrapper does not report it.
    assert not _WorkAcceleratorTimeout(groups[0], works[0], _TIMEOUT).is_completed()
    for group in groups:
        group.shutdown()


def test_a_reduction_for_which_only_the_stream_waits_does_not_depend_on_time() -> None:
    unfinished: Any = object()
    assert PendingReduction(unfinished, blocks_host=False).is_done()


def test_an_abort_that_gloo_does_not_notice_ends_the_wait() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [_GlooAtAddress("127.0.0.1", _TIMEOUT) for _ in range(2)]
    errors: list[Exception] = []
    manager: Any = SimpleNamespace(report_error=errors.append)
    address = f"127.0.0.1:{store.port}/test"
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda place: groups[place].configure(address, f"r{place}", place, 2), range(2)
            )
        )
        work = groups[0].allreduce([torch.ones(4)], dist.AllreduceOptions())
        waiting = threads.submit(PendingHostReduction(manager, work, groups[0]).wait)
        time.sleep(0.2)
        assert not waiting.done()
        # Its connections stay open here, as if gloo had not noticed that they were closed.
        groups[0].num_aborts += 1
        waiting.result(timeout=5)
        assert [str(error) for error in errors] == ["the process group was aborted"]
        assert not work.is_completed()
        for group in groups:
            group.abort()


@pytest.mark.parametrize("has_device", [False, True])
def test_the_end_of_a_wait_is_the_end_of_the_reduction(
    monkeypatch: pytest.MonkeyPatch, streams: RecordedStreams, has_device: bool
) -> None:
    """On a device, its current stream waits for the stream of the call."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_device)
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.current)
    monkeypatch.setattr(torch.accelerator, "set_stream", streams.set_current)
    work: Any = SimpleNamespace(
        wait=lambda: streams.log.append(f"{streams.current().name} waits for the reduction")
    )
    pending = PendingReduction(work)
    if has_device:
        streams.set_current(streams.stream("next"))
    pending.wait()
    assert streams.log[0] == "main waits for the reduction"
    assert streams.log[1:] == (["next waits for main"] if has_device else [])


def test_a_host_reduction_waits_as_torchft_does() -> None:
    """Its wait reports errors, and divides."""
    waits: list[str] = []
    inner = SimpleNamespace(is_completed=lambda: True)
    work: Any = SimpleNamespace(_work=inner, wait=lambda: waits.append("waited"))
    group: Any = SimpleNamespace(num_aborts=0)
    manager: Any = None
    PendingHostReduction(manager, work, group).wait()
    assert waits == ["waited"]


def test_a_host_reduction_blocks_until_it_is_completed() -> None:
    is_completed, num_looks = False, 0

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        assert num_looks < 10, "it waits without blocking"
        return is_completed

    def block(timeout: timedelta) -> None:
        nonlocal is_completed
        assert timeout > timedelta(0)
        is_completed = True

    work: Any = SimpleNamespace(
        _work=SimpleNamespace(is_completed=look, wait=block), wait=lambda: None
    )
    group: Any = SimpleNamespace(num_aborts=0)
    manager: Any = None
    PendingHostReduction(manager, work, group).wait()
    assert is_completed


def test_a_quorum_is_connected_after_the_work_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collectives of the former quorum may be among it."""
    order: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: order.append("synchronized"))
    manager: Any = object.__new__(QuorumManager)
    manager._pg = SimpleNamespace(configure=lambda *given: order.append("connected"))
    manager._group_rank, manager._group_world_size, manager._replica_id = 0, 1, "a"
    quorum = SimpleNamespace(
        replica_ids=["replica_0:a"], store_address="a:1", quorum_id=1,
        replica_rank=0, replica_world_size=1,
    )  # fmt: skip
    manager._connect(quorum)
    assert order == ["synchronized", "connected"]


def test_the_progress_of_a_replica_is_what_it_reports() -> None:
    manager: Any = object.__new__(QuorumManager)
    manager._step = 0
    manager.set_progress(40)
    assert manager.current_step() == 40


def _wrapped(group: ProcessGroupGloo, work: Any, flat: torch.Tensor) -> PendingReduction:
    manager: Any = None
    timed = _WorkAcceleratorTimeout(group, work, _TIMEOUT)
    return PendingReduction(_ManagedWork(manager, timed, flat))
