"""Memory of a step by kind, over time: every storage that an operation returns, from its creation
until it is freed.

The kind of a storage may become known after its creation (a gradient is a result of backward like
any other until it is accumulated), so sums are formed at the end.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from torchtitan_lite.distributed.torch_compat import local_tensor, tensors_in

Kind = Literal["weights", "gradients", "optimizer", "activations", "logits", "buffers"]
KINDS: tuple[Kind, ...] = (
    *("weights", "optimizer", "gradients", "buffers", "activations", "logits"),
)
"""Kinds in the order of the picture: the longest-lived first."""

ByKind = Mapping[Kind, float]
"""Bytes."""


@dataclass
class _Storage:
    """A storage: its kind, and its sizes from one time to the next."""

    reference: weakref.ref[torch.UntypedStorage]
    kind: Kind
    num_bytes: int
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(time, bytes): the size from that time on."""


class StorageLog:
    """Sizes of all noted storages over time. Time is the number of noted operations."""

    def __init__(self) -> None:
        self.time = 0
        self._live: dict[int, _Storage] = {}
        self._all: list[_Storage] = []

    def note(self, result: Any, kind: Kind) -> None:
        """Note the results of an operation; new storages are of `kind`."""
        self.time += 1
        for tensor in tensors_in(result):
            # Subclasses hold local tensors, which are noted separately.
            if tensor.device.type != "meta" and tensor is local_tensor(tensor):
                self._take_in(tensor.untyped_storage(), kind)

    def measure_again(self) -> None:
        """Measure every storage again: FSDP frees and refills its own in place."""
        for storage in list(self._live.values()):
            held = storage.reference()
            if held is not None:
                self._take_in(held, storage.kind)

    def set_kind(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Change the kind of the storages of `tensors`, also in the past."""
        for tensor in tensors:
            storage = self._live.get(id(local_tensor(tensor).untyped_storage()))
            if storage is not None:
                storage.kind = kind

    def sums(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return the live bytes [time, kind], in the order of `KINDS`."""
        changes = np.zeros((self.time + 2, len(KINDS)), dtype=np.int64)
        for storage in self._all:
            before = 0
            for time, num_bytes in storage.sizes:
                changes[time, KINDS.index(storage.kind)] += num_bytes - before
                before = num_bytes
        return changes.cumsum(axis=0)

    def _take_in(self, held: torch.UntypedStorage, kind: Kind) -> None:
        key, num_bytes = id(held), held.nbytes()
        storage = self._live.get(key)
        if storage is None:
            reference = weakref.ref(held, lambda _: self._drop(key))
            storage = self._live[key] = _Storage(reference, kind, 0)
            self._all.append(storage)
        if num_bytes != storage.num_bytes:
            storage.num_bytes = num_bytes
            storage.sizes.append((self.time, num_bytes))

    def _drop(self, key: int) -> None:
        # Freed after the newest operation, so it counts in that one.
        storage = self._live.pop(key)
        storage.sizes.append((self.time + 1, 0))
