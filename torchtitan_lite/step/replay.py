"""Recomputation of an anomalous step, to tell faulty hardware from bad data.

Each rank compares what it alone computed: its part of the loss, and the norm of each gradient
before any reduction over shards. If the second result differs, memory or processor of that rank are
faulty; if all ranks agree, the data (or the weights) are the cause. Layer: above mesh, optim,
replica and spec.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan_lite import rng
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.optim import ShardedOptimizer
from torchtitan_lite.replica import Replicas, Share
from torchtitan_lite.spec import Microbatch, PipelineSchedule
from torchtitan_lite.torch_compat import local_tensor

TOLERANCE = 1e-2
"""Relative tolerance of nondeterministic kernels. A flipped bit that makes a step anomalous changes
far more."""


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
        self._generators: dict[str, Any] = {}
        self._hooked = WeakIdKeyDictionary()
        for module in model.modules():
            # Runs after the hook of FSDP, which puts unsharded parameters in place.
            module.register_forward_pre_hook(self._hook_parameters)

    def begin(self) -> None:
        """Start to observe a step."""
        self._norms = []
        self._generators = rng.capture()

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
        first = [loss, *self._norms]
        self._optimizer.zero_grad()
        rng.restore(self._generators)
        self.begin()
        replayed = torch.zeros_like(loss)
        if microbatches:
            replayed += self._schedule.run(microbatches, backward=True)
        self._optimizer.zero_grad()
        world_size, rank = self._mesh.world_size, self._mesh.rank
        flags = torch.zeros(share.count * world_size, dtype=torch.float64, device=loss.device)
        if share.index >= 0 and not self._equal(first, [replayed, *self._norms]):
            flags[share.index * world_size + rank] = 1
        if not replicas.all_reduce(flags):
            return None
        return self._mesh.all_reduce_(flags).nonzero().flatten().tolist()

    def _hook_parameters(self, module: nn.Module, inputs: Any) -> None:
        """Observe the gradients of the weights that `module` uses."""
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                parameter.register_hook(self._record_norm)

    def _record_norm(self, gradient: torch.Tensor) -> None:
        local = local_tensor(gradient).detach()
        self._norms.append(torch.linalg.vector_norm(local, dtype=torch.float64))

    def _equal(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        return len(first) == len(second) and torch.allclose(
            torch.stack(tuple(first)),
            torch.stack(tuple(second)),
            rtol=self._tolerance,
            atol=0,
            equal_nan=True,
        )
