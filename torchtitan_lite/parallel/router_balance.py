"""The load of the routers: counted by each rank, added up over all, and evened out by the bias.

Invariant: a bias changes only with a committed step, by the counts of all its tokens, so it is the
same on every rank and every mesh. Layer: above nn and mesh.
"""

from collections.abc import Sequence

import torch
from torch import nn

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.moe import Router
from torchtitan_lite.schema.parallelism import ParallelismConfig


class RouterBalance:
    """The routers of a model. A model without any has empty counts and costs nothing."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        num_experts: int,
        mesh: Mesh,
        parallelism: ParallelismConfig,
    ) -> None:
        """`model` is what this rank holds of the model, whose routers are called `names`."""
        self._routers = routers_of(model)
        self._names = list(names)
        self._num_experts = num_experts
        # Without sequence parallelism the ranks that share the matrices count the same tokens.
        self._copies = 1 if parallelism.enable_sequence_parallel else mesh.degrees.tp

    def counted(self, device: torch.device) -> torch.Tensor:
        """This rank's share of the tokens that chose each expert since the last `settle`: float64,
        one number for each expert of each router of the model, zero for those of other stages. The
        sum over all ranks is the load of the step."""
        # L: the routers of the model.
        counts_LX = torch.zeros(
            len(self._names), self._num_experts, dtype=torch.float64, device=device
        )
        for name, router in self._routers.items():
            counts_LX[self._names.index(name)] = router.load_X
        return counts_LX.flatten() / self._copies

    def settle(self, counts: torch.Tensor, *, committed: bool) -> dict[str, torch.Tensor]:
        """Move the biases by the summed `counts`, unless the step was refused, and count from zero
        again. Returns the load [X] of each router of the model, by name."""
        # Whole numbers again: what several ranks have counted came in parts.
        counts_LX = counts.round().view(len(self._names), self._num_experts)
        loads = dict(zip(self._names, counts_LX, strict=True))
        for name, router in self._routers.items():
            if committed:
                router.update_expert_bias(loads[name])
            router.load_X.zero_()
        return loads


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of a model by name, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
