"""Hugging Face folders on meshes: each byte is read once, and training and generation are those of
one process and of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.hugging_face import (
    FAMILIES,
    add_tokenizer,
    has_experts,
    in_transformers,
    make_folder,
    update_config,
)
from tests.harness.jobs import run_job
from tests.harness.ranks import WorkerPool
from tests.harness.tolerances import PARITY_FLOAT64, PARITY_RECURRENT_FLOAT64
from tests.parity.meshes import assert_same
from torchtitan_lite.api import ParallelismConfig, generate, load_model, start_mesh
from torchtitan_lite.checkpoint.convert.hugging_face import snapshot
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.distributed.device import detect_device

Pools = Callable[[int], WorkerPool]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, {"data_parallel_shard_degree": 2}),
    "tp-2": (2, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}),
    "ep-2": (2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}),
    "pp-2": (2, {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}),
    "cp-2": (
        2,
        {
            "data_parallel_shard_degree": 1,
            "context_parallel_degree": 2,
            "context_parallel_rotate_method": "allgather",
        },
    ),
    "fsdp-2-tp-2": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "fsdp-8": (8, {"data_parallel_shard_degree": 8}),
    "fsdp-4-ep-4": (4, {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4}),
}


def load(run: Path, folder: Path, parallelism: dict[str, Any]) -> tuple[Any, int]:
    """Load the folder in this worker and train ten steps; return the outcome and the bytes of
    weights that this rank has read. Every parameter is split into blocks, whatever its size."""
    num_bytes = 0
    read, read_into = LocalStorage.read, LocalStorage.read_into

    def counted_read(self: LocalStorage, path: str, start: int = 0, stop: int | None = None) -> Any:
        nonlocal num_bytes
        found = read(self, path, start, stop)
        num_bytes += len(found) * path.startswith(f"{folder.name}/model-")
        return found

    def counted_read_into(
        self: LocalStorage, path: str, start: int, target: memoryview, seen: Any
    ) -> None:
        nonlocal num_bytes
        num_bytes += len(target) * path.startswith(f"{folder.name}/model-")
        read_into(self, path, start, target, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read", counted_read)
        patch.setattr(LocalStorage, "read_into", counted_read_into)
        patch.setattr(snapshot, "_SMALL_BYTES", 0)
        outcome = run_job(
            run,
            {
                "model.flavor": "hf",
                "model.hf_assets_path": str(folder),
                # A smaller one would multiply the rounding of gradients near 0, and a higher rate
                # that of the recurrences.
                "optimizer.eps": 1e-3,
                "optimizer.lr": 1e-3,
                "checkpoint.enable": True,
                "checkpoint.async_mode": "disabled",
                "checkpoint.initial_load_path": str(folder),
                "training.steps": 10,
                # 2 for the stages of a pipeline, with a global batch of 8.
                "training.local_batch_size": 1 if 8 in parallelism.values() else 2,
            }
            | {f"parallelism.{key}": value for key, value in parallelism.items()},
        )
    return outcome, num_bytes


def check(family: str, mesh: str, pools: Pools, tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", family))
    # That of the begin of documents, which is an input in every block.
    update_config(folder, pad_token_id=0)
    ((alone, read_alone),) = pools(1).run(load, tmp_path / "alone", folder, {})
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("model-*")
    )
    weights = sum(file.stat().st_size for file in folder.glob("model-*")) - headers
    if family.startswith(("aria", "llama4")):
        # Both halves of a fused stack are read by whole rows: the stack is read twice.
        assert headers + weights < read_alone < headers + 1.5 * weights
    else:
        assert read_alone == headers + weights
    world_size, parallelism = MESHES[mesh]
    found = pools(world_size).run(load, tmp_path / "n", folder, parallelism)
    assert sum(read for _, read in found) == world_size * headers + (read_alone - headers)
    is_recurrent = family.startswith("qwen3_next")
    tolerance = PARITY_RECURRENT_FLOAT64 if is_recurrent else PARITY_FLOAT64
    for outcome, _ in found:
        assert_same(outcome, alone, tolerance, unequal_targets=False)


def test_a_folder_loads_on_a_mesh(pools: Pools, tmp_path: Path) -> None:
    check("llama_tied_stretched", "fsdp-2-tp-2", pools, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "family"),
    [(mesh, name) for mesh in MESHES for name in FAMILIES if "ep" not in mesh or has_experts(name)],
)
def test_every_folder_trains_on_every_mesh(
    family: str, mesh: str, pools: Pools, tmp_path: Path
) -> None:
    check(family, mesh, pools, tmp_path)


def greedy_ids(folder: Path, prompt: str, num_tokens: int, degrees: dict[str, int]) -> list[int]:
    """Return the ids that the model of a folder generates on the ranks of this worker's pool."""
    config = ParallelismConfig.model_validate(degrees)
    with start_mesh(config, device=detect_device("cpu")) as mesh:
        loaded = load_model(folder, mesh=mesh, dtype=torch.float32)
        (text,) = generate(loaded, [prompt], max_new_tokens=num_tokens, temperature=0)
    return text.ids


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_every_folder_generates_as_transformers(family: str, pools: Pools, tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", family))
    theirs = in_transformers("AutoModelForCausalLM", folder, dtype=torch.float32)
    tokenizer = in_transformers("AutoTokenizer", folder)
    prompt = "def main() -> None:"
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt).input_ids]])
    # It names further ends, which random models generate soon.
    (folder / "generation_config.json").unlink(missing_ok=True)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    mask = torch.ones_like(ids)
    wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=64, **settings)
    expected = wanted[0, ids.shape[1] :].tolist()
    assert len(set(expected)) > 1, "the model repeats one token: raise its initializer_range"
    (alone,) = pools(1).run(greedy_ids, folder, prompt, 64, {})
    # The end is not part of our text.
    assert alone == expected[: len(alone)] and len(alone) >= len(expected) - 1
    on_two = pools(2).run(greedy_ids, folder, prompt, 64, {"tensor_parallel_degree": 2})
    assert on_two == [alone] * 2
