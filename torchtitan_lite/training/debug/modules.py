"""The module that is running: in forward, recomputation and backward.

Hooks report forward. For backward, the tracker records the sequence numbers of the autograd nodes
that each module creates in forward; the number of the running node then identifies its module.
Backward hooks would add nodes to the graph.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtitan_lite.distributed.torch_compat import current_node_number, next_node_number

ROOT = "model"
"""Name of the entire model, whose own name is empty."""


class ModuleTracker:
    """Tracks the modules of `parts`, which are the model or some of its stages, inside its `with`
    block; each block starts anew."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._modules = [
            (name or ROOT, module) for part in parts for name, module in part.named_modules()
        ]
        self.names = [name for name, _ in self._modules]
        self._handles: list[RemovableHandle] = []
        self._in_forward: list[str] = []
        # Nodes from this number on belong to this module.
        self._numbers: list[int] = []
        self._owners: list[str] = []

    def __enter__(self) -> Self:
        self._in_forward, self._numbers, self._owners = [], [], []
        for name, module in self._modules:
            # Before and after all other hooks, which may communicate for the module.
            self._handles += [
                module.register_forward_pre_hook(self._entering(name), prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def module(self) -> str | None:
        """Name of the innermost running module; None if none runs."""
        if self._in_forward:
            return self._in_forward[-1]
        node_number = current_node_number()
        if node_number is None:
            return None
        place = bisect_right(self._numbers, node_number) - 1
        return self._owners[place] if place >= 0 else ROOT

    @property
    def phase(self) -> str | None:
        """ "forward", "backward" (including recomputed activations), or None for neither."""
        if current_node_number() is not None:
            return "backward"
        return "forward" if self._in_forward else None

    def _entering(self, name: str) -> Any:
        def enter(*_: object) -> None:
            self._in_forward.append(name)
            self._note_owner()

        return enter

    def _leave(self, *_: object) -> None:
        self._in_forward.pop()
        self._note_owner()

    def _note_owner(self) -> None:
        # Nodes created in backward, by recomputation, never run.
        if current_node_number() is None:
            self._numbers.append(next_node_number())
            self._owners.append(self._in_forward[-1] if self._in_forward else ROOT)
