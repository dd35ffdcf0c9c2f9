"""Adds gradients up over replicas, in flat buckets. Layer: above torchft_manager and optim.

A rank's peers in other replicas hold the same shards of the same parameters, so that flat buckets
of local shards serve every parallelism inside a replica.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.redistribute import align_gradient
from torchtitan_lite.replica.torchft_manager import QuorumManager
from torchtitan_lite.torch_compat import foreach_copy_

_IN_FLIGHT = 3
"""Buckets at a time: one is filled, one travels, one is emptied."""


class GradientSums:
    """Sums over replicas, of whatever parameters this rank has."""

    def __init__(self, manager: QuorumManager, bucket_bytes: int) -> None:
        self._manager, self._bucket_bytes = manager, bucket_bytes
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        """Add `.grad` and `counts` (float64) over all that take part. A gradient that a replica
        has not, as for want of samples, counts as zero; one that nobody has stays None."""
        present = torch.tensor(
            [float(parameter.grad is not None) for parameter in parameters], dtype=torch.float64
        )
        numbers = torch.cat([counts, present.to(counts.device)])
        counting = self._manager.sum_(numbers)
        gradients = [_gradient(parameter) for parameter in parameters]
        moving: deque[tuple[list[torch.Tensor], torch.Tensor, torch.distributed.Work]] = deque()
        for bucket in self._buckets(gradients):
            if len(moving) == _IN_FLIGHT:
                self._empty(*moving.popleft())
            flat = self._flat(bucket)
            foreach_copy_(_views(flat, bucket), bucket)
            moving.append((bucket, flat, self._manager.sum_(flat)))
        counting.wait()
        while moving:
            self._empty(*moving.popleft())
        counts.copy_(numbers[: len(counts)])
        for parameter, holders in zip(parameters, numbers[len(counts) :].tolist(), strict=True):
            if not holders:
                parameter.grad = None

    def _buckets(self, gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Of one dtype and device each, in the order of the parameters."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for gradient in gradients:
            kind = (gradient.dtype, gradient.device)
            if sizes.get(kind, 0) + gradient.nbytes > self._bucket_bytes and kinds.get(kind):
                yield kinds.pop(kind)
                sizes[kind] = 0
            kinds.setdefault(kind, []).append(gradient)
            sizes[kind] = sizes.get(kind, 0) + gradient.nbytes
        yield from kinds.values()

    def _flat(self, bucket: Sequence[torch.Tensor]) -> torch.Tensor:
        """Memory for a bucket, kept from one step to the next."""
        first, length = bucket[0], sum(gradient.numel() for gradient in bucket)
        free = self._free.setdefault((first.dtype, first.device), [])
        for place, flat in enumerate(free):
            if flat.numel() >= length:
                return free.pop(place)[:length]
        elements = max(length, self._bucket_bytes // first.dtype.itemsize)
        return torch.empty(elements, dtype=first.dtype, device=first.device)[:length]

    def _empty(
        self, bucket: list[torch.Tensor], flat: torch.Tensor, work: torch.distributed.Work
    ) -> None:
        work.wait()
        foreach_copy_(bucket, _views(flat, bucket))
        whole = flat.as_strided((flat.untyped_storage().nbytes() // flat.itemsize,), (1,))
        self._free[flat.dtype, flat.device].append(whole)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, made of zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = align_gradient(parameter)
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _views(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([gradient.numel() for gradient in bucket])
    return [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
