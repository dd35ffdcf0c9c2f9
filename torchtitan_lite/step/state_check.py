"""Check that nothing but the optimizer changes weights and optimizer state: a bit that flips in
memory is found on the rank that has it, in the step that it would spoil.

A rank sums its tensors as integers after each update and before the next one. Integer sums are
exact in any order, and differ if one bit differs. The sums cost one read of the state each. Layer:
above phases.
"""

from collections.abc import Mapping

import torch

from torchtitan_lite.phases import Phase
from torchtitan_lite.torch_compat import local_tensor

_SHOWN = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateCheck:
    """The sums of this rank's state after its last update. A phase listener: healing replaces the
    state."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None

    def entered(self, phase: Phase, step: int) -> None:
        """Forget the sums before healing. See `phases.PhaseListener`."""
        if phase is Phase.HEALING:
            self._sums = None

    def seal(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the sums of `tensors`, which only healing and the next update may change."""
        self._names, self._sums = list(tensors), _sums(tensors)

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return 0-d, on the device, whether `tensors` have changed since `seal`; None if there is
        nothing to compare with."""
        self._differs = None
        if self._sums is None or list(tensors) != self._names:
            return None
        self._differs = _sums(tensors) != self._sums
        return self._differs.any()

    def describe(self) -> str:
        """Name the tensors that the last comparison found changed. The host waits."""
        differs = [] if self._differs is None else self._differs.tolist()
        names = [name for name, one in zip(self._names, differs, strict=False) if one]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more} changed in memory, although nothing wrote to it"


def _sums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([_sum(local_tensor(one)) for one in tensors.values()])


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    contiguous = tensor.detach().contiguous()
    return contiguous.view(_INTEGERS[contiguous.element_size()]).sum(dtype=torch.int64)
