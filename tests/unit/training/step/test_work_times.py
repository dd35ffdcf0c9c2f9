"""Waiting in collectives is no work, a rank's loss of time has a cause, and ranks are compared with
those of the same stage."""

import time

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.distributed.torch_compat import collective_waits
from torchtitan_lite.fault_tolerance.replica import Share
from torchtitan_lite.training.step.work_times import WorkTimes


def test_the_waits_of_torch_are_measured_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _functional_collectives as functional

    originals = dist.Work.wait, functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: time.sleep(0.02) or tensor)
    replaced = functional.wait_tensor
    with collective_waits() as waits:
        assert waits.seconds == 0
        functional.wait_tensor(torch.zeros(1))
        assert 0.02 <= waits.seconds < 2
        with collective_waits() as inner:
            functional.wait_tensor(torch.zeros(1))
        assert inner.seconds >= 0.02
        assert dist.Work.wait is not originals[0]
    assert functional.wait_tensor is replaced and dist.Work.wait == originals[0]


def test_measurements_end_in_any_order() -> None:
    from torch.distributed import _functional_collectives as functional

    originals = dist.Work.wait, functional.wait_tensor
    first, second = collective_waits(), collective_waits()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dist.Work.wait is not originals[0]
    second.__exit__(None, None, None)
    assert (dist.Work.wait, functional.wait_tensor) == originals


def test_compiled_code_may_wait() -> None:
    from torch.distributed import _functional_collectives as functional

    def waits_for(tensor: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(tensor) + 1

    with collective_waits():
        compiled = torch.compile(waits_for, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    ("seconds", "slow_ranks"), [((1.0, 1.0, 2.0, 2.0), []), ((1.0, 1.0, 1.0, 2.0), [3])]
)
def test_ranks_are_compared_with_those_of_their_stage(
    mesh: Mesh, seconds: tuple[float, ...], slow_ranks: list[int]
) -> None:
    mesh.degrees, mesh.world_size = ParallelDims(pp=2, tp=2), 4
    times = WorkTimes(mesh, 0)
    # Per rank: its replica, microbatches, seconds of work, seconds of waiting, last write.
    totals = torch.tensor([[0.0, 1.0, one, 0.0, 0.0, 0.0] for one in seconds]).double().flatten()
    events = [one for _ in range(64) for one in times.record(totals, 1, is_valid=True)]
    assert [event.values["rank"] for event in events] == slow_ranks


def test_the_bytes_of_a_write_are_exact(mesh: Mesh) -> None:
    """Float32 has no odd integers of this size."""
    num_bytes = 2**40 + 1
    values = WorkTimes(mesh, 3).local_values(Share(index=1, count=2), (0.1, num_bytes))
    own = [3.0, 0.0, 0.0, 0.0, 0.1, num_bytes]
    assert values.tolist() == [0.0] * 6 + own
    values = WorkTimes(mesh, 3).local_values(Share(index=0, count=2), (0.1, num_bytes))
    assert values.tolist() == own + [0.0] * 6
    # A spare has done nothing.
    assert not WorkTimes(mesh, 3).local_values(Share(index=-1, count=2), (0.1, 1)).any()


@pytest.mark.parametrize(("replica", "num_reports"), [(0, 1), (1, 0)])
def test_one_of_all_ranks_reports(
    mesh: Mesh, replica: int, num_reports: int, logged: pytest.LogCaptureFixture
) -> None:
    times = WorkTimes(mesh, replica)
    totals = torch.tensor([[float(one), 1.0, 1.0 + one, 0.0, 0.0, 0.0] for one in (0, 1)])
    events = [one for _ in range(64) for one in times.record(totals.flatten(), 1, is_valid=True)]
    assert [event.values["replica"] for event in events] == [1]
    assert len(logged.messages) == num_reports
