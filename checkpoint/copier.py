"""Copies of live state into a slot of shared memory.

With a free core, or state on a GPU, the copy overlaps with the next forward and backward. Otherwise
it runs immediately, because competing with busy cores costs more than the copy itself (measured: a
third more). Invariant: the sources do not change before `wait` returns.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from torchtitan_lite.checkpoint.save_plan import SavePlan
from torchtitan_lite.checkpoint.tensors import DTYPES
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.torch_compat import clear_cuda_error, foreach_copy_

_CHUNK_BYTES = 64 << 20


def has_free_core() -> bool:
    """Return whether a background thread finds a free core, judging by torchrun's and OpenMP's
    settings."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len(os.sched_getaffinity(0)) > ranks * torch.get_num_threads()


class Copier:
    """Copies the tensors of a save plan into one of several slots."""

    def __init__(self, plan: SavePlan, slots: Sequence[memoryview], device: torch.device) -> None:
        """`slots` must have the plan's size and outlive the copier."""
        self._device = device
        self._targets = [
            {held.name: _part(slot, held.offset, held.bytes, held.dtype, held.local_shape)
             for held in plan.held_tensors()}
            for slot in slots
        ]  # fmt: skip
        self._overlaps = device.type != "cpu" or has_free_core()
        self._pool = ThreadPoolExecutor(1, "snapshot") if self._overlaps else None
        self._running: Future[float] | None = None
        self._stream = None
        self._pinned: list[int] = []
        """Addresses of the page-locked slots."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pinned = _pin(slots)
        self.seconds = 0.0
        """Seconds of training time that the last copy cost at most."""

    def start(self, slot: int, parts: Mapping[str, torch.Tensor], then: Callable[[], None]) -> None:
        """Start copying this rank's local tensors, which must not change before `wait`, and call
        `then` on completion. Raises ValueError unless they are those of the plan."""
        if parts.keys() != self._targets[slot].keys():
            missing = [name for name in self._targets[slot] if name not in parts]
            unknown = [name for name in parts if name not in self._targets[slot]]
            raise ValueError(
                "The tensors to copy are not those of the plan: they lack "
                f"{', '.join(missing[:3]) or 'none'}, and have {', '.join(unknown[:3]) or 'none'} "
                "beside it."
            )
        targets = [self._targets[slot][name] for name in parts]
        sources = list(parts.values())
        if self._stream is not None:
            # Wait for the pending computation on the device.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._pool is None:
            self.seconds = self._copy(targets, sources, then)
        else:
            self._running = self._pool.submit(self._copy, targets, sources, then)

    def wait(self) -> None:
        """Block until the copy is complete. Raises its errors."""
        if self._running is None:
            return
        started, running = time.perf_counter(), self._running
        self._running = None
        copy_s = running.result()
        # A device overlaps copies with computation at no cost; a CPU does not.
        self.seconds = copy_s if self._stream is None else time.perf_counter() - started

    def close(self) -> None:
        """Stop the thread, and unlock the memory of the slots, which may be unmapped then. Raises
        the errors of a running copy."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            _unpin(self._pinned)
            self._pinned = []

    @torch.no_grad()
    def _copy(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        then: Callable[[], None],
    ) -> float:
        started = time.perf_counter()
        # Batched calls, because per-tensor calls contend for the GIL.
        try:
            for chosen in _chunks(sources):
                outs, inputs = targets[chosen], sources[chosen]
                if self._stream is None:
                    foreach_copy_(outs, inputs)
                    continue
                with torch.cuda.stream(self._stream):
                    foreach_copy_(outs, inputs, non_blocking=True)
        finally:
            # Also after an error: the memory must not be unlocked during a copy.
            if self._stream is not None:
                self._stream.synchronize()
        then()
        return time.perf_counter() - started


def _chunks(tensors: Sequence[torch.Tensor]) -> list[slice]:
    chunks, first, size = [], 0, 0
    for place, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= _CHUNK_BYTES or place == len(tensors) - 1:
            chunks.append(slice(first, place + 1))
            first, size = place + 1, 0
    return chunks


def _part(
    slot: memoryview, start: int, length: int, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    if length == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    raw = torch.frombuffer(slot, dtype=torch.uint8, count=length, offset=start)
    return raw.view(DTYPES[dtype]).view(shape)


def _pin(slots: Sequence[memoryview]) -> list[int]:
    """Page-lock memory, which device copies need to be asynchronous, and return its addresses.

    Without it (a limit of the container, say) copies still work, but occupy the thread that makes
    them, and are slower.
    """
    pinned: list[int] = []
    for slot in slots:
        address = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
        code = int(_runtime().cudaHostRegister(address, len(slot), 0))
        if code:
            clear_cuda_error()
            logger.warning(
                "Snapshots are copied to pageable memory, which is slower: %.3f GB of shared "
                "memory cannot be page-locked (CUDA error %d).",
                sum(map(len, slots)) / 1e9,
                code,
            )
            _unpin(pinned)
            return []
        pinned.append(address)
    return pinned


def _unpin(addresses: Sequence[int]) -> None:
    """Unlock memory before it is unmapped: its addresses would stay registered, and the next
    registration of memory mapped there would fail."""
    for address in addresses:
        if int(_runtime().cudaHostUnregister(address)):
            clear_cuda_error()


def _runtime() -> Any:
    return torch.cuda.cudart()
