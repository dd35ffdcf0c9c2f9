"""Which module is at work: in forward, when activations are computed again, and in backward.

Hooks tell of forward. For backward the tracker notes which numbers autograd gives to the nodes that
each module makes in forward; the number of the node that runs then tells whose backward it is. So
the graph stays as it is, where backward hooks would put nodes of their own into it.
Layer: imports torch_compat.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtitan_lite.torch_compat import current_node_number, next_node_number

ROOT = "model"
"""What the whole model is called, whose own name is empty."""


class ModuleTracker:
    """Follows the modules of `parts`, which are the model or some stages of it, inside its `with`
    block; what it knows is forgotten when the next block begins."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._modules = [
            (name or ROOT, module) for part in parts for name, module in part.named_modules()
        ]
        self.names = [name for name, _ in self._modules]
        self._handles: list[RemovableHandle] = []
        self._in_forward: list[str] = []
        # From the node with this number on, nodes belong to this module.
        self._numbers: list[int] = []
        self._owners: list[str] = []

    def __enter__(self) -> Self:
        self._in_forward, self._numbers, self._owners = [], [], []
        for name, module in self._modules:
            # Before and after all other hooks, which may communicate on the module's behalf.
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
        """The name of the innermost module at work; None when none is."""
        if self._in_forward:
            return self._in_forward[-1]
        number = current_node_number()
        if number is None:
            return None
        place = bisect_right(self._numbers, number) - 1
        return self._owners[place] if place >= 0 else ROOT

    @property
    def phase(self) -> str | None:
        """ "forward", "backward" (what is computed again counts as this), or None for neither."""
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
        # Nodes that are made in backward, to compute activations again, never run.
        if current_node_number() is None:
            self._numbers.append(next_node_number())
            self._owners.append(self._in_forward[-1] if self._in_forward else ROOT)
