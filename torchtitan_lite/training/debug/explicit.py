"""Errors on implicit redistributions: DTensor redistributes wherever an operation needs other
placements than its inputs have.

Calls of `redistribute`, and their backward, are allowed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.tensor import Placement

from torchtitan_lite.core.errors import RedistributionError
from torchtitan_lite.distributed.torch_compat import ImplicitRedistributions
from torchtitan_lite.training.debug.modules import ROOT, ModuleTracker


def explicit_redistribution(
    parts: Sequence[nn.Module],
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that raises RedistributionError on implicit redistributions in forward and
    backward of the model, whose parts on this rank are `parts`."""
    tracker = ModuleTracker(parts)

    def refuse(
        operation: str, source: tuple[Placement, ...], wanted: tuple[Placement, ...]
    ) -> None:
        raise RedistributionError(
            f"Implicit redistribution in the {tracker.phase or 'step'} of "
            f"{tracker.module or ROOT}: {operation} is given a DTensor placed as "
            f"{_shown(source)} and needs it as {_shown(wanted)}. Call redistribute() before it, or "
            "choose placements that need none; debug.explicit_redistribution = false allows it."
        )

    @contextmanager
    def context() -> Iterator[None]:
        with tracker, ImplicitRedistributions(refuse):
            yield

    return context


def _shown(placements: tuple[Placement, ...]) -> str:
    return f"({', '.join(str(placement) for placement in placements)})"
