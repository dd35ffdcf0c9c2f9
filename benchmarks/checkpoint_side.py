"""A side of the comparison of checkpoints, and ours. A side is told of the end of each step, and
asked before the state changes.

Apart from the others, so that a restart of ours imports what ours needs.
"""

from pathlib import Path

import torch

from benchmarks.checkpoint_state import BenchState
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.schema.checkpoint import CheckpointConfig

STEPS = 6
"""Of a cycle, whose first step is a multiple of it and saves."""


class Side:
    """Saves nothing: what the others are set against."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path) -> None:
        self.state, self.mesh, self.folder = state, mesh, folder

    def ready(self) -> torch.Tensor:
        """Come back when the state may change, with what goes into the step's exchange of numbers,
        which every loop has."""
        return torch.zeros(4, dtype=torch.float64)

    def agreed(self, sums: torch.Tensor) -> None:
        """The exchange is over."""

    def after_step(self, *, saves: bool) -> None:
        """The state has changed."""

    def settle(self) -> None:
        """Come back when what was saved is durable."""

    def close(self) -> None:
        """End all that was started."""


class Ours(Side):
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
        return self.manager.local_signals(torch.device("cpu"))

    def agreed(self, sums: torch.Tensor) -> None:
        self.manager.apply_signals(sums)

    def after_step(self, *, saves: bool) -> None:
        # It saves by itself, at the multiples of its interval.
        self.manager.after_step()

    def settle(self) -> None:
        self.manager.wait_for_saves()

    def close(self) -> None:
        self.manager.final_save(finished=True)
        self.manager.close()
