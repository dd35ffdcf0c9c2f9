"""Scheduled garbage collection.

Python's automatic collection runs at different times on each rank, and then all other ranks wait.
Here every rank collects in the same steps, so they wait once. Invariant: closing restores automatic
collection if it was enabled before.
"""

import gc
import time
from collections import Counter
from typing import Self

import torch

from torchtitan_lite.core.log import logger


class ScheduledGarbageCollection:
    """Disables automatic collection until closed.

    Every `freq` steps the young generations are collected. With `debug`, everything is collected in
    every step, and the objects found are logged: they are in reference cycles, which hold memory
    (above all tensors) until they are collected.
    """

    def __init__(self, freq: int, debug: bool = False) -> None:
        self._freq = freq
        self._debug = debug
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect(1)

    def step(self, step: int) -> float:
        """Collect if it is due. Returns the seconds it took."""
        if not self._debug and step % self._freq != 0:
            return 0.0
        start_s = time.perf_counter()
        if self._debug:
            description = _collect_and_describe()
            if description:
                logger.info(f"Garbage of step {step}: {description}.")
        else:
            gc.collect(1)
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Restore automatic collection. Idempotent."""
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _collect_and_describe() -> str:
    """Collect everything and describe the number and types of the objects; "" for none."""
    flags = gc.get_debug()
    # Keeps unreachable objects in gc.garbage, so that they can be inspected.
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        types = Counter(type(unreachable).__name__ for unreachable in gc.garbage)
        tensor_bytes = sum(
            unreachable.untyped_storage().nbytes()
            for unreachable in gc.garbage
            if issubclass(type(unreachable), torch.Tensor)
        )
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    gc.collect()
    if not types:
        return ""
    common = ", ".join(f"{count} {name}" for name, count in types.most_common(5))
    return (
        f"{types.total()} objects in cycles ({common}), {tensor_bytes / 2**20:.1f} MiB in tensors"
    )
