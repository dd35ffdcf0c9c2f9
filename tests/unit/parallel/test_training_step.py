"""A step on several ranks has the loss and the gradients of a step on one, whatever splits it.

The ranks are threads. Most sizes are odd; tests/parity trains more meshes, in processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import tolerances
from tests.harness.jobs import odd_config, whole
from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, resolve_degrees
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch
from torchtitan_lite.optim.gradients import local_gradients, square_norm
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.expert import RouterBalance, routers_of
from torchtitan_lite.parallel.pipeline_stages import join_stages
from torchtitan_lite.training.builders.model import build_model
from torchtitan_lite.training.trained_model import trained_spec

# torch warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_BATCH, _LENGTH = 4, 24
_EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The results of a step on one rank."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    """Entire, on rank 0."""
    router_counts: list[float]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Threads that build models at the same time must not change the default to and fro."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("world_size", "model", "degrees"),
    [
        pytest.param(4, {}, {"data_parallel_replicate": 2}, id="replicas of shards"),
        pytest.param(
            6,
            {"context_parallel_rotate_method": "ulysses"},
            {"data_parallel_replicate": 2, "context_parallel": 3},
            id="replicas of sequence shards",
        ),
        pytest.param(
            8,
            {"context_parallel_rotate_method": "alltoall"},
            {"pipeline_parallel": 2, "context_parallel": 2, "data_parallel_shard": 2},
            id="ring in a pipeline",
        ),
        pytest.param(4, {}, {"tensor_parallel": 2, "data_parallel_replicate": 2}, id="matrices"),
        pytest.param(
            8,
            {"enable_sequence_parallel": False},
            {"pipeline_parallel": 2, "tensor_parallel": 2, "data_parallel_replicate": 2},
            id="matrices in a pipeline",
        ),
        pytest.param(
            8,
            _EXPERTS,
            {
                "data_parallel_replicate": 2,
                "context_parallel": 2,
                "tensor_parallel": 2,
                "expert_parallel": 2,
            },
            id="experts and sequences",
        ),
        pytest.param(
            4,
            {**_EXPERTS, "enable_sequence_parallel": False},
            {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2},
            id="experts and their matrices",
        ),
    ],
)
def test_a_step_is_that_of_one_rank(
    world_size: int, model: dict[str, Any], degrees: dict[str, int], tmp_path: Path
) -> None:
    chosen = {key if "." in key else f"parallelism.{key}": one for key, one in model.items()}
    sizes = {f"parallelism.{axis}_degree": size for axis, size in degrees.items()}
    of_model = {key: one for key, one in chosen.items() if key.startswith("model.")}
    expected = _alone(tmp_path, tuple(of_model.items()))
    steps = run_on_threads(world_size, _step, tmp_path, {**chosen, **sizes})
    for step in steps:
        assert step.loss == pytest.approx(expected.loss, rel=tolerances.PARITY_FLOAT64)
        assert step.norm == pytest.approx(expected.norm, rel=tolerances.PARITY_FLOAT64)
        assert step.router_counts == expected.router_counts
    assert steps[0].gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        difference = (steps[0].gradients[name] - gradient).abs().max()
        assert difference <= tolerances.PARITY_FLOAT64 * gradient.abs().max(), name


@cache
def _alone(folder: Path, model: tuple[tuple[str, Any], ...]) -> _Step:
    (step,) = run_on_threads(1, _step, folder, dict(model))
    return step


def _step(folder: Path, overrides: dict[str, Any]) -> _Step:
    config = odd_config(folder, {"model.attention_mask": "causal", **overrides})
    mesh = Mesh(detect_device("cpu"), resolve_degrees(config.parallelism, dist.get_world_size()))
    spec = trained_spec(config)
    parts = build_model(config, spec, mesh)
    schedule = build_pipeline_schedule(
        parts, spec, cross_entropy(), mesh, config.parallelism, torch.float64
    )
    own = _microbatches(spec.vocab_size)[mesh.batch_rank :: mesh.degrees.batch]
    loss = schedule.run(own, backward=True)
    model = join_stages(parts, spec, mesh)
    parameters = dict(model.named_parameters())
    squared_norm = square_norm(local_gradients(list(parameters.values())))
    gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
    routers = [f"layers.{layer}.feed_forward.router" for layer in range(3)] * bool(spec.num_experts)
    balance = RouterBalance(model, routers, spec.num_experts, mesh, config.parallelism)
    assert len(routers_of(model)) == len(routers) or mesh.degrees.pp > 1
    counts = mesh.all_reduce_(balance.counts(torch.device("cpu")))
    return _Step(
        loss=mesh.all_reduce_(loss).item(),
        norm=mesh.all_reduce_(squared_norm).sqrt().item(),
        gradients=whole(gradients, on_rank=0),
        router_counts=counts.round().tolist(),
    )


def _microbatches(vocab_size: int) -> list[Microbatch]:
    """Return the microbatches of a step, of one sample each, with unequal numbers of targets."""
    draws = torch.Generator().manual_seed(5)
    batches = []
    for sample in range(_BATCH):
        tokens_BS = torch.randint(0, vocab_size, (1, _LENGTH), generator=draws)
        targets_BS = tokens_BS.roll(-1, dims=1)
        targets_BS[:, : sample * 5] = IGNORE_INDEX
        batches.append(
            Microbatch(
                tokens_BS=tokens_BS,
                targets_BS=targets_BS,
                positions_BS=torch.arange(_LENGTH)[None],
                documents_BS=None,
                rng_keys_B=torch.tensor([sample]),
                samples=(sample,),
            )
        )
    return batches
