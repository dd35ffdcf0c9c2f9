"""All ranks report a slow rank in a real job."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.jobs import mesh_for, odd_config
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.step.work_times import WorkTimes
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

_STEPS = 82
"""Steps of the run. The first has no predecessor to measure; then 64 are judged together, every 16
steps."""


def events_of(folder: Path) -> list[StepEvent]:
    """Return the events of a job whose rank 1 works far longer than the others."""
    settings = {
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 1,
        "training.global_batch_size": 2,
        "training.steps": _STEPS,
    }
    config = odd_config(folder, settings)
    end = WorkTimes.end

    def late_end(self: WorkTimes) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        end(self)

    reported: list[StepEvent] = []

    def watch(state: TrainState, report: StepReport) -> None:
        reported.extend(report.events)

    WorkTimes.end = late_end
    try:
        with build(config, mesh_for(config), StopRequest()) as built:
            train(replace(built.job, hooks=[watch]))
    finally:
        WorkTimes.end = end
    return reported


@pytest.mark.matrix
def test_all_ranks_report_the_same_slow_rank(
    pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    first, second = pools(2).run(events_of, tmp_path / "run")
    assert first == second
    assert [one.name for one in first] == ["slow_rank"]
    assert first[0].values["rank"] == 1 and first[0].values["times_slower"] > 1.1
