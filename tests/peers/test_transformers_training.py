"""Training in float32 on several meshes against transformers' model, torch's AdamW and a plain
loop."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.harness import tolerances
from tests.harness.hugging_face import add_tokenizer, make_folder
from tests.harness.jobs import mesh_for, odd_config, run_job
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.nn.spec import IGNORE_INDEX
from torchtitan_lite.training.builders import build

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
Pools = Callable[[int], WorkerPool]
STEPS = 20
RUN: dict[str, Any] = {
    "model.flavor": "hf",
    "model.attention_mask": "causal",
    "training.dtype": "float32",
    "training.steps": STEPS,
    "optimizer.lr": 1e-3,
    "optimizer.decay_norms_biases_embeddings": True,
    "lr_scheduler.total_steps": 40,
}
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp-2": (2, {"data_parallel_shard_degree": 2}),
    "tp-2": (2, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}),
    "cp-2": (2, {"data_parallel_shard_degree": 1, "context_parallel_degree": 2}),
    "pp-2": (2, {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}),
    "fsdp-2-tp-2": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
}
WITH_EXPERTS = {"ep-2": (2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2})}
ROWS = [
    *((family, mesh) for family in ("llama", "qwen3_tied", "qwen3_moe") for mesh in MESHES),
    ("qwen3_moe", "ep-2"),
    ("mixtral", "fsdp-2"),
    ("mixtral", "ep-2"),
]


def settings(folder: Path, parallelism: dict[str, int]) -> dict[str, Any]:
    loading = {
        "model.hf_assets_path": str(folder),
        "checkpoint.enable": True,
        "checkpoint.async_mode": "disabled",
        "checkpoint.initial_load_path": str(folder),
    }
    return {**RUN, **loading, **{f"parallelism.{key}": n for key, n in parallelism.items()}}


def plain_loop(run: Path, folder: Path) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms. Only the samples and the learning rates come from this
    project."""
    config = odd_config(run, settings(folder, {}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    adamw, training = config.optimizer, config.training
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw.lr,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )
    losses, norms = [], []
    with build(config, mesh_for(config), StopRequest()) as built:
        state = built.job.state
        for step in range(STEPS):
            first = step * 8
            (batch,) = state.loader.load([range(first, first + 8)], step + 1)
            logits_BSV = model(input_ids=batch.tokens_BS).logits
            loss = cross_entropy(
                logits_BSV.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORE_INDEX
            )
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = state.lr_scheduler.lr(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(norm.item())
    return losses, norms


@pytest.fixture(scope="module")
def expected(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[float], list[float]]]:
    @cache
    def of(family: str) -> tuple[Path, list[float], list[float]]:
        folder = tmp_path_factory.mktemp(family)
        model = add_tokenizer(make_folder(folder / "hf", family))
        ((losses, norms),) = pools(1).run(plain_loop, folder / "run", model)
        return model, losses, norms

    return of


@pytest.mark.parametrize(("family", "mesh"), ROWS)
def test_losses_and_norms_equal_those_of_a_plain_loop(
    family: str,
    mesh: str,
    pools: Pools,
    expected: Callable[[str], tuple[Path, list[float], list[float]]],
    tmp_path: Path,
) -> None:
    folder, losses, norms = expected(family)
    ranks, parallelism = {**MESHES, **WITH_EXPERTS}[mesh]
    overrides = settings(folder, parallelism)
    for outcome in pools(ranks).run(run_job, tmp_path / "run", overrides, timeout_s=300):
        wanted = pytest.approx(losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        assert outcome.losses == wanted
        assert outcome.grad_norms == pytest.approx(norms, rel=tolerances.PARITY_FLOAT32_NORM)
