"""torchtitan's own checkpoint manager as a side of the comparison, where torchtitan is installed.

It belongs into an environment of its own, since it brings much that nobody needs here:

    python -m venv peers && peers/bin/pip install torch==2.13.0 -r requirements.txt psutil
    peers/bin/pip install --no-deps torchtitan==0.3.0 torch_checkpointing tyro docstring_parser
    peers/bin/python -m benchmarks.checkpoint
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_side import STEPS, Side
from benchmarks.checkpoint_sides import SIDES, Make
from benchmarks.checkpoint_state import BenchState
from torchtitan_lite.mesh import Mesh

ASYNCHRONOUS = "torchtitan async"
_SYNCHRONOUS = "torchtitan synchronous"


def sides_of(group: str) -> dict[str, Make]:
    """Those of a group of `SIDES`; among the saves torchtitan's in the modes that need no GPU."""
    if group != "saves" or find_spec("torchtitan") is None:
        return SIDES[group]
    modes = {ASYNCHRONOUS: "async", _SYNCHRONOUS: "disabled"}
    return SIDES[group] | {name: _torchtitan(mode) for name, mode in modes.items()}


class Torchtitan(Side):
    """Its manager, told of each step as its trainer does it."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path, *, mode: str) -> None:
        super().__init__(state, mesh, folder)
        # Not among the requirements, so that its types are not known either.
        from torchtitan.components.checkpointer.dcp import (  # pyright: ignore[reportMissingImports]
            CheckpointManager,
        )

        tensors = state.tensors()
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        moments = {name: tensor for name, tensor in tensors.items() if name not in weights}
        self.manager: Any = CheckpointManager(
            CheckpointManager.Config(enable=True, async_mode=mode, interval=STEPS, keep_latest_k=2),
            dataloader=None,
            model_parts=[_Model(weights)],
            optimizers=_Stateful(lambda: moments),
            lr_schedulers=_Stateful(lambda: {"last_epoch": state.step}),
            states={"train_state": _Stateful(lambda: {"step": torch.tensor(state.step)})},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def ready(self) -> torch.Tensor:
        self.manager.maybe_wait_for_staging()
        return super().ready()

    def after_step(self, *, saves: bool) -> None:
        # It saves by itself, at the multiples of its interval.
        self.manager.save(self.state.step)

    def settle(self) -> None:
        self.manager.maybe_wait_for_saving()

    def close(self) -> None:
        self.settle()
        self.manager.close()


class _Stateful:
    """An object that has a state dict."""

    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values())

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Tensors are loaded in place; the rest is not asked for."""


class _Model(torch.nn.Module):
    """A module that has these weights under their names."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._weights)


def _torchtitan(mode: str) -> Make:
    return lambda *given: Torchtitan(*given, mode=mode)
