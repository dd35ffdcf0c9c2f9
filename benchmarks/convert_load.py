"""Ranks that load one Hugging Face folder, each its shards, and each all of it by safetensors.

Started by `benchmarks.convert`, on its own or by torchrun. Writes FOLDER/rank_N.json.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard

from benchmarks.checkpoint_state import sharding_mesh
from benchmarks.processes import THREADS
from torchtitan_lite.checkpoint import load
from torchtitan_lite.checkpoint.conversion import expected_shapes
from torchtitan_lite.checkpoint.hugging_face import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.storage import open_parent_storage
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Take turns, and write the seconds."""
    parser = argparse.ArgumentParser(description="Loads of a Hugging Face folder.")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    mesh = sharding_mesh(port=given.port)
    files = sorted(given.source.glob("*.safetensors"))
    spec = model_spec(hugging_face_model(read_hugging_face_config(given.source), str(given.source)))
    parameters, _ = expected_shapes(spec)
    live = {f"model.{name}": _sharded(shape, mesh) for name, shape in parameters.items()}
    num_read = 0

    def ours() -> None:
        nonlocal num_read
        before = _rchar()
        storage, name = open_parent_storage(str(given.source))
        snapshot = HuggingFaceSnapshot(storage, name, spec, num_blocks=mesh.world_size)
        load(snapshot, dict(live), {"model"}, mesh)
        storage.close()
        num_read = _rchar() - before

    def each_all() -> None:
        for file in files:
            for tensor in load_file(file).values():
                # Mapped until it is read.
                tensor.clone()

    sides: dict[str, Callable[[], None]] = {"ours": ours, "safetensors": each_all}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(given.rounds + 1):
        for name, side in sides.items():
            mesh.barrier()
            began_s = time.perf_counter()
            side()
            mesh.barrier()
            if number:
                found[name].append(time.perf_counter() - began_s)
    told = {**found, "read": num_read, "threads": torch.get_num_threads(), "sum": _sum(live)}
    (given.folder / f"rank_{mesh.rank}.json").write_text(json.dumps(told))


def _sharded(shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
    rows = -(-shape[0] // mesh.world_size)
    here = max(0, min(rows, shape[0] - mesh.rank * rows))
    local = torch.zeros(here, *shape[1:], dtype=torch.bfloat16)
    return DTensor.from_local(
        local,
        mesh.device_mesh["dp_shard"],
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _sum(live: dict[str, torch.Tensor]) -> int:
    """Of the bits of this rank's parts, which is that of all when the ranks' are added."""
    total = 0
    for tensor in live.values():
        assert isinstance(tensor, DTensor)
        total += int(tensor.to_local().view(torch.int16).sum(dtype=torch.int64))
    return total


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


if __name__ == "__main__":
    main()
