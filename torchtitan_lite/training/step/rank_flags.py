"""Flags of single ranks, known to all ranks with the reduction of a step: damaged state, and a loss
of its own that is not finite.

A position per rank of each replica, to which all others add zeros. They stay on the device, so that
the host does not wait.
"""

import torch

from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import Share

_DAMAGED, _NON_FINITE, _HAS_LOSS = 1, 2, 4


def local_flags(
    loss: torch.Tensor, is_damaged: torch.Tensor | None, share: Share, mesh: Mesh
) -> torch.Tensor:
    """Return this rank's flags for the reduction: float64 [participants * ranks], on the device.
    `loss` is its part of the loss; `is_damaged` is 0-d, 1 if its state has changed in memory."""
    flags = torch.zeros(share.count * mesh.world_size, dtype=torch.float64, device=loss.device)
    if share.index >= 0:
        own = _NON_FINITE * ~loss.detach().isfinite()
        # The other stages of a pipeline have none.
        own = own + _HAS_LOSS * (loss.detach() != 0)
        if is_damaged is not None:
            own = own + _DAMAGED * is_damaged
        flags[share.index * mesh.world_size + mesh.rank] = own
    return flags


def damaged_ranks(flags: torch.Tensor) -> list[int]:
    """Return the ranks whose state is damaged, by index among all ranks of all replicas."""
    return [rank for rank, flag in enumerate(flags.tolist()) if int(flag) & _DAMAGED]


def non_finite_ranks(flags: torch.Tensor) -> list[int]:
    """Return the ranks whose own loss is not finite, by index as above, if it is one rank or a
    minority of those with a loss. Else the fault is in what all have, such as the weights."""
    ranks = [rank for rank, flag in enumerate(flags.tolist()) if int(flag) & _NON_FINITE]
    num_losses = sum(int(flag) & _HAS_LOSS > 0 for flag in flags.tolist())
    return ranks if len(ranks) == 1 or 2 * len(ranks) < num_losses else []
