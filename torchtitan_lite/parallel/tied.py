"""One weight in two stages of a pipeline, such as that of tied embeddings.

The stage that comes first owns it: only there it has optimizer state, a norm and a place in
checkpoints. The other computes with a copy, which is refreshed before each run and whose gradient
travels back after it. Each rank holds the same part of both, so parts travel as they lie.
Layer: above mesh, redistribute and spec.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.parallel.stages import StagePlan
from torchtitan_lite.redistribute import align_gradient
from torchtitan_lite.spec import ModelSpec


class TiedCopy:
    """The owner and the copy, as far as this rank holds them; nothing where nothing is tied."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        plan: StagePlan,
        spec: ModelSpec,
        group: dist.ProcessGroup,
    ) -> None:
        """`stages` are those of this rank. `group` is that of the pipeline."""
        self._group = group
        self._owner_rank = self._copy_rank = 0
        self._owner = self._copy = None
        if spec.tied_units is None:
            return
        held = [
            next(stage for stage, units in enumerate(plan.modules) if unit in units)
            for unit in spec.tied_units
        ]
        if held[0] == held[1]:
            return
        self._owner_rank, self._copy_rank = (plan.ranks[stage] for stage in held)
        self._owner, self._copy = (
            stages[stage].get_submodule(unit).get_parameter("weight") if stage in stages else None
            for stage, unit in zip(held, spec.tied_units, strict=True)
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the owner's values. Every rank of the pipeline must call it."""
        ranks = self._owner_rank, self._copy_rank
        self._move(self._owner, self._copy, ranks, lambda copy, values: copy.copy_(values))

    @torch.no_grad()
    def return_gradient(self) -> None:
        """Add the copy's gradient to the owner's. Every rank of the pipeline must call it."""
        of_copy, of_owner = (
            None if parameter is None else align_gradient(parameter)
            for parameter in (self._copy, self._owner)
        )
        ranks = self._copy_rank, self._owner_rank
        self._move(of_copy, of_owner, ranks, lambda owner, values: owner.add_(values))
        if self._copy is not None:
            self._copy.grad = None

    def _move(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        ranks: tuple[int, int],
        receive: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Hand the values of this rank's part of `source` to `receive`, on the rank of `target`."""
        source_rank, target_rank = (dist.get_global_rank(self._group, rank) for rank in ranks)
        if source is not None and target is not None:
            receive(_local(target), _local(source))
        elif source is not None and _local(source).numel():
            dist.send(_local(source).contiguous(), target_rank, self._group)
        elif target is not None and _local(target).numel():
            values = torch.empty_like(_local(target), memory_format=torch.contiguous_format)
            dist.recv(values, source_rank, self._group)
            receive(_local(target), values)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
