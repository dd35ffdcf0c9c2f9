"""What the ranks of a copy, and copies of a model, agree on."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from tests.harness.threads import run_on_threads
from torchtitan_lite.core.errors import CheckpointError, MeshError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.parallel.inference import broadcast_from_first
from torchtitan_lite.serving.inference import loaded_model, weights
from torchtitan_lite.serving.inference.generation import Generated, Prompt
from torchtitan_lite.serving.inference.loaded_model import load_weights
from torchtitan_lite.serving.inference.saved_tensors import SavedTensor
from torchtitan_lite.serving.inference.texts import _complete_on_all_ranks
from torchtitan_lite.serving.inference.weights import Weights, open_weights


def test_ranks_of_a_copy_continue_with_the_tokens_of_its_first() -> None:
    def broadcast(degrees: ParallelDims) -> list[int]:
        mesh = Mesh(detect_device("cpu"), degrees)
        return broadcast_from_first([mesh.rank, 10 + mesh.rank], mesh)

    first, second = [0, 10], [2, 12]
    copies = ParallelDims(dp_replicate=2, tp=2)
    assert run_on_threads(4, broadcast, copies) == [first, first, second, second]
    alone = ParallelDims(dp_replicate=2)
    assert run_on_threads(2, broadcast, alone) == [[0, 10], [1, 11]]


def test_copies_share_the_prompts_and_all_ranks_get_all_texts_in_order() -> None:
    def complete(own: Sequence[Prompt]) -> list[Generated]:
        return [Generated(ids=[*prompt.ids, 0], stopped=prompt.ids[0] == 3) for prompt in own]

    def generate() -> list[Generated]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_replicate=2, tp=2))
        batch = [Prompt([number]) for number in range(1, 6)]
        return _complete_on_all_ranks(batch, complete, mesh)

    expected = [Generated(ids=[number, 0], stopped=number == 3) for number in range(1, 6)]
    assert run_on_threads(4, generate) == [expected] * 4


def test_all_ranks_open_the_step_that_the_leader_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "newest_step", lambda path: f"{path}/step-{dist.get_rank() + 3}")
    monkeypatch.setattr(weights, "_opened", lambda folder, ema: folder)

    def opened() -> Any:
        return open_weights("run", Mesh(detect_device("cpu"), ParallelDims(dp_shard=2)))

    assert run_on_threads(2, opened) == ["run/step-3"] * 2


def test_weights_without_floating_point_numbers_are_float32() -> None:
    unused: Any = None
    snapshot: Any = SimpleNamespace(tensors={})
    assert Weights(snapshot=snapshot, spec=unused, config=unused).dtype == torch.float32


@pytest.mark.parametrize(
    ("degrees", "tensor_parallel", "problem"),
    [
        ({"pp": 2}, None, "pipeline (2)"),
        ({"cp": 2}, None, "context (2)"),
        ({"ep": 2}, None, "expert (2)"),
        ({"dp_shard": 4, "tp": 3, "etp": 3}, 3, ""),
        ({"dp_shard": 4}, None, ""),
    ],
)
def test_the_tensor_parallelism_of_the_mesh_is_that_of_the_model(
    degrees: dict[str, int],
    tensor_parallel: int | None,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[int | None] = []

    def serve(*given: Any, dtype: Any, tensor_parallel: int | None) -> Any:
        served.append(tensor_parallel)
        return None, None

    monkeypatch.setattr(loaded_model, "serve", serve)
    monkeypatch.setattr(loaded_model, "LoadedModel", lambda **values: None)
    mesh: Any = SimpleNamespace(degrees=ParallelDims(**degrees), world_size=2)
    files: Any = SimpleNamespace(weights=None)
    try:
        load_weights(files, mesh, dtype=None, tensor_parallel=None)
    except MeshError as error:
        assert problem and problem in str(error)
    assert served == ([] if problem else [tensor_parallel])


def test_ranks_that_opened_different_checkpoints_are_told_apart() -> None:
    def distribute() -> str:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        unused: Any = None
        tensor = SavedTensor(
            name="w",
            shape=(4,),
            dtype=torch.float32,
            where=f"step-{dist.get_rank()}",
            _snapshot=unused,
        )
        with pytest.raises(CheckpointError) as error:
            tensor.distribute(mesh.device_mesh, [Replicate()] * 5)
        return str(error.value)

    for message in run_on_threads(2, distribute):
        assert message.startswith("w: ranks opened different checkpoints, step-0 and step-1.")
