"""Streamed data on meshes: one rank reads, and every step is that of one process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import FIXTURE, Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import MESHES, assert_same
from torchtitan_lite.tools.report import check_samples

Pools = Callable[[int], WorkerPool]
STREAM: dict[str, Any] = {
    "training.streaming": True,
    # The numbers of targets of the first two steps are equal.
    "training.steps": 3,
    "training.shuffle_window": 4,
    "training.local_batch_size": 2,
    "debug.sample_ledger": True,
}


class _Opens:
    """Counts how often this process opens the stream's file. A hook cannot be removed, so there is
    one for all cases of a worker."""

    count: int | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]) == str(FIXTURE):
            self.count = (self.count or 0) + 1


_OPENS = _Opens()


def run_and_count(folder: Path, overrides: dict[str, Any]) -> tuple[Outcome, int]:
    """Return the outcome of a job, and how often this rank opened the stream's file."""
    if _OPENS.count is None:
        sys.addaudithook(_OPENS)
    _OPENS.count = 0
    outcome = run_job(folder, overrides)
    return outcome, _OPENS.count


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh",
    ["tp-2", "fsdp-2-tp-2", "fsdp-4", "cp-2-allgather", "pp-2", "pp-2-tp-2-fsdp-2"],
)
def test_one_rank_reads_the_stream_of_a_node(mesh: str, pools: Pools, tmp_path: Path) -> None:
    ((expected, num_opens),) = pools(1).run(run_and_count, tmp_path / "one", STREAM)
    world_size, overrides = MESHES[mesh]
    results = pools(world_size).run(run_and_count, tmp_path / "mesh", {**overrides, **STREAM})
    for outcome, _ in results:
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)
    counts = [count for _, count in results]
    assert 0 < counts[0] <= num_opens
    assert counts[1:] == [0] * (world_size - 1)
    one, other = (check_samples(tmp_path / name) for name in ("one", "mesh"))
    assert other.problems == []
    assert {step: set(used) for step, used in other.samples.items()} == {
        step: set(used) for step, used in one.samples.items()
    }


@pytest.mark.matrix
def test_a_stream_resumes_on_another_mesh(pools: Pools, tmp_path: Path) -> None:
    settings = {**STREAM, "checkpoint.enable": True, "checkpoint.interval": 100}
    (expected,) = pools(1).run(run_job, tmp_path / "one", {**settings, "training.steps": 2})
    done = 0
    for mesh, last in (("fsdp-2", 1), ("pp-2", 2)):
        world_size, overrides = MESHES[mesh]
        moved = {**overrides, **settings, "training.steps": last}
        for outcome in pools(world_size).run(run_job, tmp_path / "moving", moved):
            assert outcome.resumed_at == done
            part = expected.losses[done:last]
            assert outcome.losses == pytest.approx(part, rel=tolerances.PARITY_FLOAT64), mesh
        done = last
