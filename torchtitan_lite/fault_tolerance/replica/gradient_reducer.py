"""Reducer of gradients over replicas, in flat buckets, as in DDP.

The same rank of each replica holds the same shards of the same parameters, so that flat buckets of
local shards serve every parallelism within a replica. A bucket is reduced as soon as all its
gradients are complete, while backward computes the next ones.

Invariant: buckets are reduced in an order that depends only on the parameters, and counts are
reduced last: a replica without samples issues the same collectives as the others.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.redistribute import align_gradient
from torchtitan_lite.distributed.torch_compat import foreach_copy_, held_tensor, local_tensor
from torchtitan_lite.fault_tolerance.replica.torchft_manager import PendingReduction, QuorumManager

_ALIGNMENT = 16
"""Elements to whose multiple each gradient in a buffer is padded."""
_MAX_IN_FLIGHT = 3
"""Maximum number of buckets: one is filled, one is reduced, one is unpacked."""


class GradientReducer:
    """Sums over replicas of the gradients of any parameters of this rank."""

    def __init__(self, manager: QuorumManager, bucket_bytes: int) -> None:
        self._manager, self._bucket_bytes = manager, bucket_bytes
        self._parameters: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._missing: list[int] | None = None
        """Gradients that each bucket still lacks; None outside of a backward that is observed."""
        self._num_sent = 0
        self._in_flight: deque[tuple[list[torch.Tensor], torch.Tensor, PendingReduction]] = deque()
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self.keeps_gradients = False
        """Whether the gradients before the sum are kept until `end_step`, which takes as much
        memory as they do."""
        self._kept: list[tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]] = []
        """Gradients of each bucket, their values before the sum, and the buffer of the sum."""
        self._before: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        """Gradients before the sum."""

    @property
    def num_bytes(self) -> int:
        """Size of all gradients of this rank; 0 before the first reduction."""
        return sum(local_tensor(parameter).nbytes for parameter in self._parameters)

    def reduce_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce each bucket as soon as it is complete, during the next backward, which must be the
        last one to accumulate into the gradients of `parameters`. `reduce` must follow."""
        self._assign_buckets(parameters)
        self._missing = [len(bucket) for bucket in self._buckets]

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        """Sum `.grad` and `counts` (float64) over the participants, in place. A gradient that a
        replica lacks, for example because it has no samples, counts as zero; one that all replicas
        lack stays None."""
        self._missing = None
        present = [float(parameter.grad is not None) for parameter in parameters]
        self._assign_buckets(parameters)
        while self._num_sent < len(self._buckets):
            if len(self._in_flight) == _MAX_IN_FLIGHT:
                self._unpack(*self._in_flight.popleft())
            self._send()
        if self.keeps_gradients:
            self._before = [
                (parameter, parameter.grad if is_present else None)
                for parameter, is_present in zip(parameters, present, strict=True)
            ]
        present_here = torch.tensor(present, dtype=torch.float64)
        numbers = torch.cat([counts, present_here.to(counts.device, non_blocking=True)])
        counting = self._manager.all_reduce_sum(numbers)
        while self._in_flight:
            self._unpack(*self._in_flight.popleft())
        counting.wait()
        self._num_sent = 0
        counts.copy_(numbers[: len(counts)])
        if all(present):
            return
        # The host waits here for the device.
        for parameter, holders in zip(parameters, numbers[len(counts) :].tolist(), strict=True):
            if not holders:
                parameter.grad = None

    def _assign_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Assign parameters to buckets of one dtype and device each, from the last to the first,
        because backward ends with the first."""
        if _are_identical(parameters, self._parameters):
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
            local = local_tensor(parameter)
            num_bytes = _padded(local) * local.itemsize
            if kind != (local.dtype, local.device) or size + num_bytes > self._bucket_bytes:
                buckets.append([])
                kind, size = (local.dtype, local.device), 0
            buckets[-1].append(parameter)
            size += num_bytes
        self._buckets = buckets
        self._bucket_of = {
            parameter: place for place, bucket in enumerate(buckets) for parameter in bucket
        }

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._missing is None:
            return
        place = self._bucket_of[parameter]
        if place < self._num_sent:
            raise AssertionError("a gradient was accumulated after its bucket was reduced")
        self._missing[place] -= 1
        # Never block here: this rank would wait for the others in the middle of its backward. With
        # NCCL only the stream waits, and buckets are sent at the same places on all ranks.
        while self._num_sent < len(self._buckets) and not self._missing[self._num_sent]:
            if len(self._in_flight) == _MAX_IN_FLIGHT:
                if not self._in_flight[0][2].is_done():
                    return
                self._unpack(*self._in_flight.popleft())
            if not all(map(_is_aligned, self._buckets[self._num_sent])):
                # Aligning a gradient is a collective, but the time at which this line runs differs
                # between ranks.
                return
            self._send()

    def _send(self) -> None:
        """Start to reduce the next bucket."""
        bucket = [_gradient(parameter) for parameter in self._buckets[self._num_sent]]
        self._num_sent += 1
        flat = self._flat_buffer(bucket)
        foreach_copy_(_views(flat, bucket), [gradient.detach() for gradient in bucket])
        self._in_flight.append((bucket, flat, self._manager.all_reduce_sum(flat)))

    def _flat_buffer(self, bucket: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return memory for a bucket, which is reused in later steps."""
        first, length = bucket[0], sum(_padded(gradient) for gradient in bucket)
        free = self._free.setdefault((first.dtype, first.device), [])
        fitting = [place for place, flat in enumerate(free) if flat.numel() >= length]
        if fitting:
            return free.pop(min(fitting, key=lambda place: free[place].numel()))[:length]
        elements = max(length, self._bucket_bytes // first.dtype.itemsize)
        return torch.empty(elements, dtype=first.dtype, device=first.device)[:length]

    def _unpack(
        self, bucket: list[torch.Tensor], flat: torch.Tensor, work: PendingReduction
    ) -> None:
        work.wait()
        if self.keeps_gradients:
            # Gradients become views of the sum, and nothing is copied.
            self._kept.append((bucket, [gradient.detach() for gradient in bucket], flat))
            for gradient, view in zip(bucket, _views(flat, bucket), strict=True):
                gradient.data = view
            return
        foreach_copy_(bucket, _views(flat, bucket))
        self._release(flat)

    def end_step(self, *, restores: bool) -> None:
        """Release what is kept. `restores`: give the parameters their gradients before the sum."""
        for bucket, before, flat in self._kept:
            if restores:
                for gradient, values in zip(bucket, before, strict=True):
                    gradient.data = values
            self._release(flat)
        if restores:
            for parameter, gradient in self._before:
                parameter.grad = gradient
        self._kept, self._before = [], []

    def _release(self, flat: torch.Tensor) -> None:
        """Allow other buckets to use a buffer."""
        whole = flat.as_strided((flat.untyped_storage().nbytes() // flat.itemsize,), (1,))
        self._free[flat.dtype, flat.device].append(whole)


def _are_identical(some: Sequence[nn.Parameter], expected: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(expected) and all(
        parameter is expected_parameter
        for parameter, expected_parameter in zip(some, expected, strict=True)
    )


def _is_aligned(parameter: nn.Parameter) -> bool:
    """Return whether a gradient has the placements of its parameter."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return True
    return gradient.placements == parameter.placements


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of a gradient, zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = align_gradient(parameter)
    assert gradient is not None
    return held_tensor(gradient)


def _padded(gradient: torch.Tensor) -> int:
    """Return the elements that a gradient takes in a buffer, so that the next one is aligned for
    vectorized kernels."""
    return -(-gradient.numel() // _ALIGNMENT) * _ALIGNMENT


def _views(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([_padded(gradient) for gradient in bucket])
    return [
        part[: gradient.numel()].view(gradient.shape)
        for part, gradient in zip(parts, bucket, strict=True)
    ]
