"""Hugging Face folders loaded on meshes: equal weights and losses, each byte read once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hugging_face import FAMILIES, add_tokenizer, make_folder, update_config
from tests.harness.jobs import run_job
from tests.harness.ranks import WorkerPool
from tests.harness.tolerances import PARITY_FLOAT64
from tests.parity.meshes import assert_same
from torchtitan_lite.checkpoint.convert.hugging_face import snapshot
from torchtitan_lite.checkpoint.storage.posix import LocalStorage

Pools = Callable[[int], WorkerPool]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, {"data_parallel_shard_degree": 2}),
    "tp-2": (2, {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}),
    "ep-2": (2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}),
    "pp-2": (2, {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}),
    "fsdp-2-tp-2": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "fsdp-8": (8, {"data_parallel_shard_degree": 8}),
    "fsdp-4-ep-4": (4, {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4}),
}


def load(run: Path, folder: Path, parallelism: dict[str, Any]) -> tuple[Any, int]:
    """Load the folder in this worker and train two steps; return the outcome and the bytes of
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
                # AdamW divides gradients near 0 by its epsilon: it would multiply their rounding.
                "optimizer.name": "SGD",
                "checkpoint.enable": True,
                "checkpoint.async_mode": "disabled",
                "checkpoint.initial_load_path": str(folder),
                "training.steps": 2,
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
    if family.startswith("llama4"):
        # Both halves of a fused stack are read by whole rows: the stack is read twice.
        assert headers + weights < read_alone < headers + 1.5 * weights
    else:
        assert read_alone == headers + weights
    world_size, parallelism = MESHES[mesh]
    found = pools(world_size).run(load, tmp_path / "n", folder, parallelism)
    assert sum(read for _, read in found) == world_size * headers + (read_alone - headers)
    for outcome, _ in found:
        assert_same(outcome, alone, PARITY_FLOAT64, unequal_targets=False)


def test_a_folder_loads_on_a_mesh(pools: Pools, tmp_path: Path) -> None:
    check("llama_tied_stretched", "fsdp-2-tp-2", pools, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_folder_loads_on_every_mesh(
    family: str, mesh: str, pools: Pools, tmp_path: Path
) -> None:
    if "ep" in mesh and not family.startswith(
        ("mixtral", "qwen3_moe", "qwen3_next", "deepseek", "gpt_oss", "llama4")
    ):
        pytest.skip("no experts")
    check(family, mesh, pools, tmp_path)
