"""The most memory that was in use while each module was at work.

A GPU's allocator tells its peaks. That of a CPU does not, so there the live tensors are added up:
each storage that an operation returns, until it is freed. torch's own MemTracker does likewise, but
it refuses a model that is called twice in a step, as with accumulated gradients or a pipeline.
Layer: above device and torch_compat.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.device import Device
from torchtitan_lite.torch_compat import tensors_in


class LiveTensors:
    """The bytes of the tensors that are alive: `tensors`, and what is noted later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live = self._peak = 0
        for tensor in tensors:
            self.note(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        self.take_peak()

    def note(self, result: Any) -> None:
        """Take in what an operation has returned."""
        for tensor in tensors_in(result):
            # Subclasses hold plain tensors, which come by on their own.
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta":
                self._take_in(tensor.untyped_storage())
        self._peak = max(self._peak, self._live)

    def measure_again(self) -> None:
        """Look at every storage again: FSDP empties and refills its own in place, which no
        operation tells of."""
        for reference, _ in list(self._storages.values()):
            storage = reference()
            if storage is not None:
                self._take_in(storage)
        self._peak = max(self._peak, self._live)

    def take_peak(self) -> int:
        """The peak since the last call."""
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
    """Peaks by module and phase. What its children use counts for a module too."""

    def __init__(self, device: Device, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors` are those that live already; a GPU's allocator knows them itself."""
        self._device = device
        self._live = None if device.has_allocator_peak else LiveTensors(tensors)
        self._at: tuple[str, str] | None = None
        self._peaks: dict[tuple[str, str], int] = {}
        self._take_peak()

    def at(self, module: str, phase: str) -> None:
        """From now on this module is at work."""
        if self._at != (module, phase):
            self.close()
            self._at = module, phase

    def note(self, result: Any) -> None:
        """Take in what an operation has returned."""
        if self._live is not None:
            self._live.note(result)

    def measure_again(self) -> None:
        """See `LiveTensors.measure_again`."""
        if self._live is not None:
            self._live.measure_again()

    def close(self) -> None:
        """Settle the peak of the module that was at work until now."""
        peak = self._take_peak()
        if self._at is not None:
            self._peaks[self._at] = max(self._peaks.get(self._at, 0), peak)

    def by_module(self, names: Iterable[str], root: str) -> dict[str, dict[str, int]]:
        """Module -> phase -> bytes, in the order of `names`. `root` is the whole model."""
        found: dict[str, dict[str, int]] = {}
        for name in names:
            inside = "" if name == root else f"{name}."
            for (module, phase), peak in self._peaks.items():
                if module == name or module.startswith(inside):
                    of_module = found.setdefault(name, {})
                    of_module[phase] = max(of_module.get(phase, 0), peak)
        return found

    def _take_peak(self) -> int:
        return self._device.take_allocator_peak() if self._live is None else self._live.take_peak()
