"""Garbage collection on a schedule. Layer: above log only.

Python collects whenever its counters say so, at another moment on every rank, and then all other
ranks wait. Here every rank collects in the same steps, so they wait once and the time is known.
Invariant: what was on before is on again afterwards.
"""

import gc
import time
from collections import Counter
from typing import Self

import torch

from torchtitan_lite.log import logger


class ScheduledGarbageCollection:
    """Turns automatic collection off until closed.

    Every `freq` steps the young generations are collected. With `debug`, everything in every step,
    and what was found is logged: those objects are in reference cycles, which hold memory (tensors
    above all) until they are collected.
    """

    def __init__(self, freq: int, debug: bool = False) -> None:
        self._freq = freq
        self._debug = debug
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect(1)

    def step(self, step: int) -> float:
        """Collect if it is time. Returns the seconds it took."""
        if not self._debug and step % self._freq != 0:
            return 0.0
        start_s = time.perf_counter()
        if self._debug:
            found = _collect_and_describe()
            if found:
                logger.info(f"Garbage of step {step}: {found}.")
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
    """Collect everything; says how many objects of which types it was, "" for none."""
    flags = gc.get_debug()
    # Keeps what would be freed in gc.garbage, so that it can be looked at.
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        types = Counter(type(found).__name__ for found in gc.garbage)
        tensor_bytes = sum(
            found.untyped_storage().nbytes()
            for found in gc.garbage
            if issubclass(type(found), torch.Tensor)
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
