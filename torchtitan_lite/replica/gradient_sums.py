"""Adds gradients up over replicas, in flat buckets. Layer: above torchft_manager and optim.

A rank's peers in other replicas hold the same shards of the same parameters, so that flat buckets
of local shards serve every parallelism inside a replica. A bucket may travel as soon as all its
gradients are there, while backward makes the next ones.

Invariant: buckets travel in one order, which follows from the parameters alone, and what is counted
travels last: a replica without samples makes the same calls as the others.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.redistribute import align_gradient
from torchtitan_lite.replica.torchft_manager import Exchange, QuorumManager
from torchtitan_lite.torch_compat import foreach_copy_

_IN_FLIGHT = 3
"""Buckets at a time: one is filled, one travels, one is emptied."""


class GradientSums:
    """Sums over replicas, of whatever parameters this rank has."""

    def __init__(self, manager: QuorumManager, bucket_bytes: int) -> None:
        self._manager, self._bucket_bytes = manager, bucket_bytes
        self._parameters: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._missing: list[int] | None = None
        """Gradients that each bucket waits for; None when no backward is listened to."""
        self._num_sent = 0
        self._moving: deque[tuple[list[torch.Tensor], torch.Tensor, Exchange]] = deque()
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """The next backward makes the gradients of `parameters` final: send each bucket when it is
        full. `sum_` must follow."""
        self._plan(parameters)
        self._missing = [len(bucket) for bucket in self._buckets]

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        """Add `.grad` and `counts` (float64) over all that take part. A gradient that a replica
        has not, as for want of samples, counts as zero; one that nobody has stays None."""
        self._missing = None
        present = [float(parameter.grad is not None) for parameter in parameters]
        self._plan(parameters)
        while self._num_sent < len(self._buckets):
            if len(self._moving) == _IN_FLIGHT:
                self._empty(*self._moving.popleft())
            self._send()
        numbers = torch.cat([counts, torch.tensor(present, dtype=torch.float64).to(counts.device)])
        counting = self._manager.sum_(numbers)
        while self._moving:
            self._empty(*self._moving.popleft())
        counting.wait()
        self._num_sent = 0
        counts.copy_(numbers[: len(counts)])
        for parameter, holders in zip(parameters, numbers[len(counts) :].tolist(), strict=True):
            if not holders:
                parameter.grad = None

    def _plan(self, parameters: Sequence[nn.Parameter]) -> None:
        """Buckets of one dtype and device each, from the last parameter to the first, since
        backward ends with the first."""
        if _are_the_same(parameters, self._parameters):
            return
        assert not self._num_sent, "the parameters changed while their gradients were summed"
        for hook in self._hooks:
            hook.remove()
        self._parameters = list(parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in parameters
        ]
        buckets: list[list[nn.Parameter]] = []
        kind, size = None, 0
        for parameter in reversed(self._parameters):
            local = _local(parameter)
            if kind != (local.dtype, local.device) or size + local.nbytes > self._bucket_bytes:
                buckets.append([])
                kind, size = (local.dtype, local.device), 0
            buckets[-1].append(parameter)
            size += local.nbytes
        self._buckets = buckets
        self._bucket_of = {one: place for place, bucket in enumerate(buckets) for one in bucket}

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._missing is None:
            return
        place = self._bucket_of[parameter]
        if place < self._num_sent:
            raise AssertionError("a gradient was made again after it had been sent")
        self._missing[place] -= 1
        # Never waits: it is the others whom this rank would wait for in the middle of its work.
        while self._num_sent < len(self._buckets) and not self._missing[self._num_sent]:
            if len(self._moving) == _IN_FLIGHT:
                if not self._moving[0][2].is_done():
                    return
                self._empty(*self._moving.popleft())
            if not all(map(_is_aligned, self._buckets[self._num_sent])):
                # To align is a collective, and when this is reached depends on time.
                return
            self._send()

    def _send(self) -> None:
        """Let the next bucket travel."""
        bucket = [_gradient(parameter) for parameter in self._buckets[self._num_sent]]
        self._num_sent += 1
        flat = self._flat(bucket)
        foreach_copy_(_views(flat, bucket), bucket)
        self._moving.append((bucket, flat, self._manager.sum_(flat)))

    def _flat(self, bucket: Sequence[torch.Tensor]) -> torch.Tensor:
        """Memory for a bucket, kept from one step to the next."""
        first, length = bucket[0], sum(gradient.numel() for gradient in bucket)
        free = self._free.setdefault((first.dtype, first.device), [])
        for place, flat in enumerate(free):
            if flat.numel() >= length:
                return free.pop(place)[:length]
        elements = max(length, self._bucket_bytes // first.dtype.itemsize)
        return torch.empty(elements, dtype=first.dtype, device=first.device)[:length]

    def _empty(self, bucket: list[torch.Tensor], flat: torch.Tensor, work: Exchange) -> None:
        work.wait()
        foreach_copy_(bucket, _views(flat, bucket))
        whole = flat.as_strided((flat.untyped_storage().nbytes() // flat.itemsize,), (1,))
        self._free[flat.dtype, flat.device].append(whole)


def _are_the_same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


def _is_aligned(parameter: nn.Parameter) -> bool:
    """Whether a gradient has the placements of its parameter."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return True
    return gradient.placements == parameter.placements


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, made of zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = align_gradient(parameter)
    assert gradient is not None
    return _local(gradient)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _views(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([gradient.numel() for gradient in bucket])
    return [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
