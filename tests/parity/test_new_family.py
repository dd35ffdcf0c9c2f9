"""A new model family is one file, its attention included: every parallelism supports it without
other changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import tolerances
from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import RankFailed, WorkerPool
from tests.parity.meshes import MESHES, assert_same
from torchtitan_lite import models
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.nn.initialize import allocate_memory, initialize, on_meta
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.serving.inference.kv_cache import KeyValueCache

Pools = Callable[[int], WorkerPool]
FOLDER = Path(__file__).parents[1] / "assets" / "new_family"


def run_with_the_file(folder: Path, overrides: dict[str, Any], family: str = "toy") -> Outcome:
    """Train a family of the folder in this worker, as if its file were in `models/`."""
    if str(FOLDER) not in models.__path__:
        models.__path__.append(str(FOLDER))
    return run_job(folder, {"model.flavor": "small", **overrides, "model.name": family})


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp-2-tp-2",
        *(
            pytest.param(mesh, marks=pytest.mark.matrix)
            for mesh in ("cp-2-ulysses", "fsdp-2", "pp-2", "tp-2", "tp-2-whole-sequence")
        ),
    ],
)
def test_a_family_in_one_file_trains_on_every_mesh(mesh: str, pools: Pools, tmp_path: Path) -> None:
    (alone,) = pools(1).run(run_with_the_file, tmp_path / "1", {"training.local_batch_size": 8})
    assert alone.losses[-1] < alone.losses[0]
    world_size, overrides = MESHES[mesh]
    for outcome in pools(world_size).run(run_with_the_file, tmp_path / "n", overrides):
        assert_same(outcome, alone, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh",
    [
        *("cp-2-ulysses", "cp-2-allgather", "tp-2", "tp-2-whole-sequence", "tp-2-cp-2", "fsdp-2"),
        *("fsdp-2-tp-2", "pp-2-fsdp-2", "pp-2-zbv", "pp-2-cp-2-fsdp-2"),
        *("recompute-op", "tp-2-recompute-op"),
    ],
)
def test_an_attention_in_one_file_trains_on_every_mesh(
    mesh: str, pools: Pools, tmp_path: Path
) -> None:
    whole = {"training.local_batch_size": 8}
    (alone,) = pools(1).run(run_with_the_file, tmp_path / "1", whole, "gated")
    assert alone.losses[-1] < alone.losses[0]
    world_size, overrides = MESHES[mesh]
    for outcome in pools(world_size).run(run_with_the_file, tmp_path / "n", overrides, "gated"):
        assert_same(outcome, alone, tolerances.PARITY_FLOAT64)


def test_an_exchange_that_the_attention_does_not_support_is_rejected(
    pools: Pools, tmp_path: Path
) -> None:
    overrides = {
        "model.flavor": "without_documents",
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_rotate_method": "alltoall",
    }
    with pytest.raises(RankFailed, match='"alltoall" is not supported by the gated attention'):
        pools(2).run(run_with_the_file, tmp_path / "n", overrides, "gated")


def test_generation_keeps_the_states_of_the_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(FOLDER)])
    spec = models.model_spec(ModelConfig(name="gated", flavor="small"))
    tokens_BS = torch.randint(0, 517, (2, 21), generator=torch.Generator().manual_seed(2))
    whole, stepwise = (on_cpu(spec) for _ in range(2))
    cache = KeyValueCache(stepwise)
    cache.allocate(2, 32)
    keys, values = 2 * 2 * 6 + 4 * 5, 4 * 9
    assert cache.num_bytes == 2 * (keys + values) * 2 * 32 * 8
    expected_BSV = logits(whole, tokens_BS, 0)
    first = 0
    for count in (12, 1, 1, 5, 1, 1):
        actual_BSV = logits(stepwise, tokens_BS[:, first : first + count], first)
        torch.testing.assert_close(
            actual_BSV,
            expected_BSV[:, first : first + count],
            rtol=tolerances.PARITY_FLOAT64,
            atol=tolerances.PARITY_FLOAT64,
        )
        first += count


def on_cpu(spec: ModelSpec) -> torch.nn.Module:
    model = on_meta(spec.build, torch.float64)
    allocate_memory(model, torch.device("cpu"))
    initialize(model, spec.init, seed=3)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module, tokens_BS: torch.Tensor, first: int) -> torch.Tensor:
    positions_BS = torch.arange(first, first + tokens_BS.shape[1]).expand_as(tokens_BS)
    rng_keys_B = torch.zeros(len(tokens_BS), dtype=torch.int64)
    return model(tokens_BS, positions_BS=positions_BS, rng_keys_B=rng_keys_B)
