"""Copies live state into a slot of shared memory beside training. Layer: above inventory.

Where a core is free, or the state lies on a GPU, the copy runs beside the next forward and
backward; else it is made at once, since beside busy cores it would cost more than it takes
(measured: a third more). Invariant: what is copied does not change until `wait` has returned.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from torchtitan_lite.checkpoint.dtypes import BY_NAME
from torchtitan_lite.checkpoint.inventory import Inventory
from torchtitan_lite.torch_compat import foreach_copy_

_CHUNK_BYTES = 64 << 20


def has_free_core() -> bool:
    """Whether a thread beside the computation finds a core, by what torchrun and OpenMP say."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len(os.sched_getaffinity(0)) > ranks * torch.get_num_threads()


class Copier:
    """Copies an inventory into any of some slots."""

    def __init__(
        self, inventory: Inventory, slots: Sequence[memoryview], device: torch.device
    ) -> None:
        """`slots` are as large as the inventory says, and live as long as this."""
        self._device = device
        self._targets = [
            {held.name: _part(slot, held.offset, held.bytes, held.dtype, held.local_shape)
             for held in inventory.held()}
            for slot in slots
        ]  # fmt: skip
        self._beside = device.type != "cpu" or has_free_core()
        self._pool = ThreadPoolExecutor(1, "snapshot") if self._beside else None
        self._running: Future[float] | None = None
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            for slot in slots:
                _pin(slot)
        self.seconds = 0.0
        """That the last copy may have taken from training."""

    def start(self, slot: int, parts: Mapping[str, torch.Tensor], then: Callable[[], None]) -> None:
        """Begin to copy this rank's parts, which must not change before `wait`, and call `then` as
        soon as they are there."""
        targets = [self._targets[slot][name] for name in parts]
        sources = list(parts.values())
        if self._stream is not None:
            # The copies begin when what is under way on the device has been computed.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._pool is None:
            self.seconds = self._copy(targets, sources, then)
        else:
            self._running = self._pool.submit(self._copy, targets, sources, then)

    def wait(self) -> None:
        """Come back when the copy is there. Raises what went wrong in it."""
        if self._running is None:
            return
        started, running = time.perf_counter(), self._running
        self._running = None
        copy_s = running.result()
        # A device copies beside its computation for nothing; a processor does not.
        self.seconds = copy_s if self._stream is None else time.perf_counter() - started

    def close(self) -> None:
        """End the thread."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()

    @torch.no_grad()
    def _copy(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        then: Callable[[], None],
    ) -> float:
        started = time.perf_counter()
        # A call for many tensors: one by one, the interpreter's lock goes to and fro each time.
        for chosen in _chunks(sources):
            outs, given = targets[chosen], sources[chosen]
            if self._stream is None:
                foreach_copy_(outs, given)
                continue
            with torch.cuda.stream(self._stream):
                foreach_copy_(outs, given, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        then()
        return time.perf_counter() - started


def _chunks(tensors: Sequence[torch.Tensor]) -> list[slice]:
    found, first, size = [], 0, 0
    for place, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= _CHUNK_BYTES or place == len(tensors) - 1:
            found.append(slice(first, place + 1))
            first, size = place + 1, 0
    return found


def _part(
    slot: memoryview, start: int, length: int, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    if length == 0:
        return torch.empty(shape, dtype=BY_NAME[dtype])
    raw = torch.frombuffer(slot, dtype=torch.uint8, count=length, offset=start)
    return raw.view(BY_NAME[dtype]).view(shape)


def _pin(slot: memoryview) -> None:
    """Lock the memory for the device's copies, which run beside the host only then."""
    address = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    assert runtime is not None
    torch.cuda.check_error(runtime.cudaHostRegister(address, len(slot), 0))
