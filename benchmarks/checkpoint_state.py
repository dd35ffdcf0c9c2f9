"""The training state that the comparisons of checkpoints save and load."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from benchmarks.state_dicts import llama
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Degrees, Mesh

_KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


class BenchState:
    """A training state that is nothing but tensors."""

    def __init__(self, tensors: Mapping[str, DTensor]) -> None:
        self._tensors, self.step = dict(tensors), 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def values(self) -> dict[str, Any]:
        return {"train_state": {"step": self.step}}

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """All is there."""

    def load_values(self, values: Mapping[str, Any]) -> None:
        self.step = values["train_state"]["step"]


def sharding_mesh(*, port: int) -> Mesh:
    """All processes that torchrun started, or this one alone, which then meets itself at `port`."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return Mesh(detect_device("cpu"), Degrees(dp_shard=dist.get_world_size()))


def sharded_state(mesh: Mesh, layers: int) -> BenchState:
    """A model and both moments of AdamW, sharded over all ranks."""
    shard = mesh.device_mesh["dp_shard"]
    tensors = {}
    for kind in _KINDS:
        for number, (name, shape) in enumerate(llama(512, 1408, 8000, layers).items()):
            rows = -(-shape[0] // mesh.world_size)
            here = max(0, min(rows, shape[0] - mesh.rank * rows))
            draws = torch.Generator().manual_seed(number)
            local = torch.randn((here, *shape[1:]), generator=draws)
            tensors[f"{kind}.{name}"] = DTensor.from_local(
                local,
                shard,
                [Shard(0)],
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
    return BenchState(tensors)
