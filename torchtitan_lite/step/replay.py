"""Recomputation of an anomalous step, to tell faulty hardware from bad data.

Each rank compares what it alone computed: its part of the loss, and the norm of each gradient
before any reduction over shards. If the second result differs, memory or processor of that rank are
faulty; if all ranks agree, the data (or the weights) are the cause. Layer: above errors, mesh,
replica and spec.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan_lite import rng
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.optim import ShardedOptimizer
from torchtitan_lite.replica import Replicas, Share
from torchtitan_lite.spec import Microbatch, Schedule

TOLERANCE = 1e-2
"""Relative tolerance of nondeterministic kernels. A flipped bit that makes a step anomalous changes
far more."""


class Replay(Protocol):
    """Observes steps, and recomputes one."""

    def begin(self) -> None:
        """Start of forward and backward."""
        ...

    def end(self, loss: torch.Tensor) -> None:
        """End of forward and backward, with this rank's part of the loss."""
        ...

    def differing(
        self, microbatches: Sequence[Microbatch], share: Share, replicas: Replicas
    ) -> list[int] | None:
        """Recompute the step. Returns the indices of ranks with other results, by replica and rank;
        None if a replica was lost meanwhile. Gradients are invalid afterwards. All ranks of all
        replicas must call it."""
        ...


class NoReplay:
    """Without `fault_tolerance.replay_check`: the data are the cause."""

    def begin(self) -> None:
        return None

    def end(self, loss: torch.Tensor) -> None:
        return None

    def differing(
        self, microbatches: Sequence[Microbatch], share: Share, replicas: Replicas
    ) -> list[int] | None:
        return []


class StepReplay:
    """See `Replay`."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        *,
        tolerance: float,
    ) -> None:
        """`tolerance` is relative; 0: bitwise."""
        self._schedule, self._optimizer, self._mesh = schedule, optimizer, mesh
        self._tolerance = tolerance
        self._norms: list[torch.Tensor] = []
        self._numbers: list[torch.Tensor] = []
        self._generators: dict[str, Any] = {}
        self._seen = WeakIdKeyDictionary()
        for module in model.modules():
            # FSDP puts the whole weights in place in a hook of its own, which comes before.
            module.register_forward_pre_hook(self._watch)

    def begin(self) -> None:
        self._norms = []
        self._generators = rng.capture()

    def end(self, loss: torch.Tensor) -> None:
        self._numbers = [loss.detach().double().clone(), *self._norms]

    def differing(
        self, microbatches: Sequence[Microbatch], share: Share, replicas: Replicas
    ) -> list[int] | None:
        first, device = self._numbers, self._mesh.device.torch_device
        self._optimizer.zero_grad()
        rng.restore(self._generators)
        self.begin()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        if microbatches:
            loss += self._schedule.run(microbatches, backward=True)
        self.end(loss)
        self._optimizer.zero_grad()
        flags = torch.zeros(share.count * self._mesh.world_size, dtype=torch.float64, device=device)
        if share.index >= 0 and not self._same(first, self._numbers):
            flags[share.index * self._mesh.world_size + self._mesh.rank] = 1
        if not replicas.all_reduce(flags):
            return None
        return self._mesh.sum(flags).nonzero().flatten().tolist()

    def _watch(self, module: nn.Module, inputs: Any) -> None:
        """Observe the gradients of the weights that `module` uses."""
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._seen:
                self._seen[parameter] = True
                parameter.register_hook(self._look)

    def _look(self, gradient: torch.Tensor) -> None:
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self._norms.append(torch.linalg.vector_norm(own.detach(), dtype=torch.float64))

    def _same(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        return len(first) == len(second) and torch.allclose(
            torch.stack(tuple(first)),
            torch.stack(tuple(second)),
            rtol=self._tolerance,
            atol=0,
            equal_nan=True,
        )
