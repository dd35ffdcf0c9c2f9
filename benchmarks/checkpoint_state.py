"""The training state that the checkpoint benchmark saves and loads, and our variant of saving it.

Other variants are in `checkpoint_variants`, so a timed restart of ours imports what ours needs.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from benchmarks.state_dicts import llama
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims

STEPS = 6
"""Steps of a cycle, whose first step is a multiple of it and saves."""
_KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


class BenchState:
    """A training state that consists of tensors."""

    def __init__(self, tensors: Mapping[str, DTensor]) -> None:
        self._tensors, self.step = dict(tensors), 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def values(self) -> dict[str, Any]:
        return {"train_state": {"step": self.step}}

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: all tensors exist."""

    def load_values(self, values: Mapping[str, Any]) -> None:
        self.step = values["train_state"]["step"]


def sharding_mesh(*, port: int) -> Mesh:
    """A mesh of all processes that torchrun started, or of this one, with a store at `port`."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return Mesh(detect_device("cpu"), ParallelDims(dp_shard=dist.get_world_size()))


def sharded(shape: tuple[int, ...], mesh: Mesh, make: Callable[..., torch.Tensor]) -> DTensor:
    """Shard dim 0 of a tensor over all ranks; `make` returns a local shard of a given shape."""
    rows = -(-shape[0] // mesh.world_size)
    own = max(0, min(rows, shape[0] - mesh.rank * rows))
    return DTensor.from_local(
        make((own, *shape[1:])),
        mesh.device_mesh["dp_shard"],
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def sharded_state(mesh: Mesh, layers: int) -> BenchState:
    """A model and both moments of AdamW, sharded over all ranks."""
    tensors = {}
    for kind in _KINDS:
        for index, (name, shape) in enumerate(llama(512, 1408, 8000, layers).items()):
            generator = torch.Generator().manual_seed(index)
            make = partial(torch.randn, generator=generator)
            tensors[f"{kind}.{name}"] = sharded(shape, mesh, make)
    return BenchState(tensors)


class Variant:
    """A way to save, called in each step; this one saves nothing and is the reference."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path) -> None:
        self.state, self.mesh, self.folder = state, mesh, folder

    def ready(self) -> torch.Tensor:
        """Block until the state may be modified; return values for the step's reduction."""
        return torch.zeros(4, dtype=torch.float64)

    def reduced(self, sums: torch.Tensor) -> None:
        """Handle the reduced values."""

    def after_step(self, *, saves: bool) -> None:
        """Handle the end of a step."""

    def settle(self) -> None:
        """Block until the save is durable."""

    def close(self) -> None:
        """Stop all background work."""


class Ours(Variant):
    """The product's manager; `every_step` takes a snapshot in each step."""

    def __init__(
        self,
        state: BenchState,
        mesh: Mesh,
        folder: Path,
        *,
        mode: str,
        every_step: bool,
        interval: int,
    ) -> None:
        super().__init__(state, mesh, folder)
        config = CheckpointConfig(
            enable=True,
            async_mode=mode,  # pyright: ignore[reportArgumentType]
            interval=interval,
            ram_interval=1 if every_step else 0,
            enable_first_step_checkpoint=False,
            keep_latest_k=2,
        )
        self.manager = CheckpointManager(
            config, dump_folder=folder, state=state, mesh=mesh, run_config={}
        )

    def ready(self) -> torch.Tensor:
        return self.manager.local_signals()

    def reduced(self, sums: torch.Tensor) -> None:
        self.manager.apply_signals(sums)

    def after_step(self, *, saves: bool) -> None:
        # The manager saves at the multiples of its interval.
        self.manager.after_step()

    def settle(self) -> None:
        self.manager.wait_for_saves()

    def close(self) -> None:
        self.manager.final_save(finished=True)
        self.manager.close()
