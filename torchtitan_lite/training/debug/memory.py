"""Peak memory per module.

A GPU's allocator reports peaks. On a CPU, the live tensors are added up: each storage that an
operation returns, until it is freed. torch's MemTracker does the same, but rejects a model that is
called twice per step, as with gradient accumulation or a pipeline.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchtitan_lite.distributed.device import Device
from torchtitan_lite.distributed.torch_compat import local_tensor, tensors_in


class LiveTensors:
    """Bytes of live tensors: `tensors`, and those noted later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live = self._peak = 0
        for tensor in tensors:
            self.note(local_tensor(tensor))
        self.take_peak()

    def note(self, result: Any) -> None:
        """Note the results of an operation."""
        for tensor in tensors_in(result):
            # Subclasses hold plain tensors, which are noted separately.
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta":
                self._take_in(tensor.untyped_storage())
        self._peak = max(self._peak, self._live)

    def measure_again(self) -> None:
        """Measure every storage again: FSDP frees and refills its own in place, without an
        operation that returns them."""
        for reference, _ in list(self._storages.values()):
            storage = reference()
            if storage is not None:
                self._take_in(storage)
        self._peak = max(self._peak, self._live)

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        self.measure_again()
        peak, self._peak = self._peak, self._live
        return peak

    def _take_in(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        known = self._storages.get(key)
        self._live += num_bytes - (known[1] if known else 0)
        reference = known[0] if known else weakref.ref(storage, lambda _: self._drop(key))
        self._storages[key] = reference, num_bytes

    def _drop(self, key: int) -> None:
        self._live -= self._storages.pop(key)[1]


class ModulePeaks:
    """Peaks by module and phase. A module's peak includes its children."""

    def __init__(self, device: Device, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors` are live already; a GPU's allocator counts them itself."""
        self._device = device
        self._live = None if device.has_allocator_peak else LiveTensors(tensors)
        self._at: tuple[str, str] | None = None
        self._peaks: dict[tuple[str, str], int] = {}
        self._take_peak()

    def at(self, module: str, phase: str) -> None:
        """Attribute memory to this module from now on."""
        if self._at != (module, phase):
            self.close()
            self._at = module, phase

    def note(self, result: Any) -> None:
        """Note the results of an operation."""
        if self._live is not None:
            self._live.note(result)

    def measure_again(self) -> None:
        """See `LiveTensors.measure_again`."""
        if self._live is not None:
            self._live.measure_again()

    def close(self) -> None:
        """Record the peak of the current module up to now."""
        peak = self._take_peak()
        if self._at is not None:
            self._peaks[self._at] = max(self._peaks.get(self._at, 0), peak)

    def by_module(self, names: Iterable[str], root: str) -> dict[str, dict[str, int]]:
        """Return module -> phase -> bytes, in the order of `names`. `root` is the entire model."""
        peaks: dict[str, dict[str, int]] = {}
        for name in names:
            inside = "" if name == root else f"{name}."
            for (module, phase), peak in self._peaks.items():
                if module == name or module.startswith(inside):
                    of_module = peaks.setdefault(name, {})
                    of_module[phase] = max(of_module.get(phase, 0), peak)
        return peaks

    def _take_peak(self) -> int:
        return self._device.take_allocator_peak() if self._live is None else self._live.take_peak()
