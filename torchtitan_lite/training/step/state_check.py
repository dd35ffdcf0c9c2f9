"""Check that nothing but the optimizer changes weights and optimizer state: a bit that flips in
memory is found on the rank that has it, in the step that it would spoil.

A rank sums its tensors as integers after each update and before the next one. Integer sums are
exact in any order, and differ if one bit differs. The sums cost one read of the state each.
"""

from collections.abc import Mapping

import torch

from torchtitan_lite.core.phases import Phase
from torchtitan_lite.distributed.torch_compat import local_tensor

_SHOWN = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateCheck:
    """The sums of this rank's state after its last update. A phase listener: healing replaces the
    state."""

    def __init__(self) -> None:
        self._sums: _Sums = {}
        self._differs: _Sums = {}

    def entered(self, phase: Phase, step: int) -> None:
        """Forget the sums before healing. See `phases.PhaseListener`."""
        if phase is Phase.HEALING:
            self._sums = {}

    def seal(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the sums of `tensors`, which only healing and the next update may change."""
        self._sums = _sums(tensors)

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return 0-d, on the device of the weights, whether `tensors` have changed since `seal`;
        None if there is nothing to compare with."""
        sums, self._differs = _sums(tensors), {}
        names = [(device, names) for device, (names, _) in sums.items()]
        if not names or names != [(device, names) for device, (names, _) in self._sums.items()]:
            return None
        self._differs = {
            device: (names, values != self._sums[device][1])
            for device, (names, values) in sums.items()
        }
        device = names[0][0]
        differs = [values.any() for _, values in self._differs.values()]
        return torch.stack([changed.to(device, non_blocking=True) for changed in differs]).any()

    def describe(self) -> str:
        """Name the tensors that the last comparison found changed. The host waits."""
        changed = [
            name
            for names, values in self._differs.values()
            for name, differs in zip(names, values.tolist(), strict=True)
            if differs
        ]
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        shown = ", ".join(changed[:_SHOWN])
        return f"{shown}{more} changed in memory, although nothing wrote to it"


_Sums = dict[torch.device, tuple[list[str], torch.Tensor]]
"""Names and sums of the tensors on each device: some optimizers count their steps on the CPU."""


def _sums(tensors: Mapping[str, torch.Tensor]) -> _Sums:
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        by_device.setdefault(local.device, {})[name] = _sum(local)
    return {
        device: (list(sums), torch.stack(list(sums.values()))) for device, sums in by_device.items()
    }


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    contiguous = tensor.detach().contiguous()
    return contiguous.view(_INTEGERS[contiguous.element_size()]).sum(dtype=torch.int64)
