"""After faults, all replicas and all copies within a replica are bitwise equal."""

import json
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.replicas import Replicas, replicas
from torchtitan_lite.checkpoint.history.identity import replica_run_id
from torchtitan_lite.checkpoint.shared_memory.folder import region_files, shared_memory_folder
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import DamagedSnapshot

_ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.seq_len=64",
    # Three rounds, which two replicas cannot split evenly.
    "--training.global_batch_size=12",
    "--metrics.log_freq=1",
    "--training.steps=100000",
    "--checkpoint.interval=1000000",
    "--checkpoint.ram_interval=1",
    "--fault_tolerance.process_group_timeout_ms=20000",
)


def _regions(run: Replicas, number: int) -> dict[int, Path]:
    run_id = replica_run_id((run.folder / "run_id").read_text().strip(), number)
    return region_files(shared_memory_folder(run_id))


def _holds_two(run: Replicas, number: int) -> bool:
    """Return whether both ranks of a replica have at least two complete snapshots."""
    try:
        regions = [Region.open(path) for path in _regions(run, number).values()]
    except DamagedSnapshot:
        # The region is being created.
        return False
    counts = [len(region.complete_slots()) for region in regions]
    for region in regions:
        region.close()
    return len(counts) == 2 and min(counts) > 1


def _remembered(run: Replicas, number: int) -> dict[int, dict[int, dict[str, bytes]]]:
    """Return rank -> step -> tensors by name and values, for the complete snapshots in shared
    memory."""
    result = {}
    for rank, path in _regions(run, number).items():
        region = Region.open(path)
        result[rank] = {}
        for step, slot in region.complete_slots().items():
            data = region.data(slot)
            held = {
                one["name"]: bytes(data[one["offset"] : one["offset"] + one["bytes"]])
                for one in region.description["tensors"]
            }
            values = region.values(slot)["values"]
            result[rank][step] = held | {"values": json.dumps(values).encode()}
            data.release()
        region.close()
    return result


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["FSDP", "copies", "adapters"])
def test_replicas_are_equal_after_healing(tmp_path: Path, mesh: str) -> None:
    arguments = list(_ARGUMENTS)
    if mesh == "adapters":
        saving = ("--training.steps=1", "--checkpoint.enable=true")
        base = [*launch.SMALL, *saving, f"--job.dump_folder={tmp_path}/base"]
        launch.run(1, base, tmp_path / "base-log")
        arguments += ["--model.converters=lora"]
        arguments += [f"--checkpoint.initial_load_path={tmp_path}/base/checkpoint/step-1"]
    if mesh == "copies":
        arguments += ["--parallelism.data_parallel_shard_degree=1"]
        arguments += ["--parallelism.data_parallel_replicate_degree=2"]
    with replicas(tmp_path / "run", 2, arguments) as run:
        run.start(0)
        run.start(1)
        run.wait_for_step(0, 3)
        run.wait_for_step(1, 3)
        run.kill(1)
        run.wait_for_step(0, run.steps(0)[-1]["step"] + 2)
        run.start(1)
        while "healed" not in (run.events(1) if run.output(1).exists() else []):
            run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
        run.wait_for_step(1, run.steps(0)[-1]["step"] + 3)
        # Memory is reserved during the first steps, which may have no snapshots.
        while not all(_holds_two(run, number) for number in (0, 1)):
            run.wait_for_step(1, run.steps(1)[-1]["step"] + 1)
        # Kill both replicas at once, and the writers that would store their snapshots.
        for number in (0, 1):
            run.suspend(number)
        for number in (0, 1):
            run.kill(number)
        of_replicas = [_remembered(run, number) for number in (0, 1)]
        assert [sorted(one) for one in of_replicas] == [[0, 1], [0, 1]]
        steps = set.intersection(*(set(held) for one in of_replicas for held in one.values()))
        held = [{rank: sorted(steps) for rank, steps in one.items()} for one in of_replicas]
        assert steps and min(steps) > 3, held
        for step in steps:
            for rank in (0, 1):
                first, second = (one[rank][step] for one in of_replicas)
                assert first.keys() == second.keys()
                differing = [name for name in first if first[name] != second[name]]
                assert not differing, (step, rank, len(first))
            if mesh == "adapters":
                tensors = of_replicas[0][0][step].keys() - {"values"}
                assert tensors and all(".lora_" in name for name in tensors)
            if mesh == "copies":
                assert of_replicas[0][0][step] == of_replicas[0][1][step]
