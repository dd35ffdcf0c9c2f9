"""Recomputation of an anomalous step, to tell faulty hardware from bad data.

Each rank compares what it alone computed: its part of the loss, and the norm of each gradient
before any reduction over shards. If the second result differs, memory or processor of that rank are
faulty. If these are equal on all ranks, but not the norms of the shards after that reduction, the
fault is on the ranks with these shards. If all ranks agree, the data (or the weights) are the
cause.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan_lite.core import rng
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.fault_tolerance.replica import Replicas, Share
from torchtitan_lite.nn.spec import Microbatch, PipelineSchedule
from torchtitan_lite.optim import ShardedOptimizer

TOLERANCE = 1e-2
"""Relative tolerance of nondeterministic kernels. A flipped bit that makes a step anomalous changes
far more."""
_SHARD, _COMPUTED = 1, 2
"""Flags of a rank: its shards of gradients differ, or what it alone computed."""


class Replay:
    """Observes the gradients of each step, and recomputes an anomalous one."""

    def __init__(
        self,
        model: nn.Module,
        schedule: PipelineSchedule,
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        *,
        tolerance: float,
    ) -> None:
        """`tolerance` is relative; 0: bitwise."""
        self._schedule, self._optimizer, self._mesh = schedule, optimizer, mesh
        self._tolerance = tolerance
        self._norms: list[torch.Tensor] = []
        self._shards: torch.Tensor | None = None
        """Norms of the gradients' local shards, after the reduction over shards."""
        self._parameters: Sequence[nn.Parameter] = ()
        """Parameters with these gradients."""
        self._generators: dict[str, Any] = {}
        self._hooked = WeakIdKeyDictionary()
        for module in model.modules():
            # Runs after the hook of FSDP, which puts unsharded parameters in place.
            module.register_forward_pre_hook(self._hook_parameters)

    def begin(self) -> None:
        """Start to observe a step."""
        self._norms, self._shards, self._parameters = [], None, ()
        self._generators = rng.capture()

    def record_local_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record the gradients after backward, which must not have been summed over replicas."""
        self._parameters = parameters
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        norms = [_norm(local_tensor(gradient).detach()) for gradient in gradients]
        self._shards = torch.stack(norms) if norms else None

    def find_mismatching_ranks(
        self,
        loss: torch.Tensor,
        microbatches: Sequence[Microbatch],
        share: Share,
        replicas: Replicas,
    ) -> list[int] | None:
        """Recompute the step, in which this rank's part of the loss was `loss`. Returns the indices
        of ranks with other results, by replica and rank; None if a replica was lost meanwhile.
        Gradients are invalid afterwards. All ranks of all replicas must call it."""
        first, shards, parameters = [loss, *self._norms], self._shards, self._parameters
        self._optimizer.zero_grad()
        rng.restore(self._generators)
        self.begin()
        replayed = torch.zeros_like(loss)
        if microbatches:
            replayed += self._schedule.run(microbatches, backward=True)
        if shards is not None:
            self.record_local_gradients(parameters)
        self._optimizer.zero_grad()
        world_size, rank = self._mesh.world_size, self._mesh.rank
        flags = torch.zeros(share.count * world_size, dtype=torch.float64, device=loss.device)
        if share.index >= 0:
            computes_differently = not self._equal(first, [replayed, *self._norms])
            has_other_shards = not self._equal(_as_list(shards), _as_list(self._shards))
            own = _COMPUTED if computes_differently else _SHARD if has_other_shards else 0
            flags[share.index * world_size + rank] = own
        if not replicas.all_reduce(flags):
            return None
        reduced = self._mesh.all_reduce_(flags)
        # What one rank computes wrongly spreads over all shards.
        worst = reduced.max().item() or _COMPUTED
        return (reduced == worst).nonzero().flatten().tolist()

    def _hook_parameters(self, module: nn.Module, inputs: Any) -> None:
        """Observe the gradients of the weights that `module` uses."""
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                parameter.register_hook(self._record_norm)

    def _record_norm(self, gradient: torch.Tensor) -> None:
        self._norms.append(_norm(local_tensor(gradient).detach()))

    def _equal(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        if [norm.shape for norm in first] != [norm.shape for norm in second]:
            return False
        return not first or torch.allclose(
            torch.stack(tuple(first)),
            torch.stack(tuple(second)),
            rtol=self._tolerance,
            atol=0,
            equal_nan=True,
        )


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _as_list(norms: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if norms is None else [norms]
