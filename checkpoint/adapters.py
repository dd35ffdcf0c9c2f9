"""Checkpoints of adapters (LoRA): what they record of the frozen weights, and both merged.

The frozen weights are no part of such a checkpoint. It records where they are and their
fingerprint, so that its adapters are never used with others.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torchtitan_lite.checkpoint.snapshots import (
    Snapshot,
    StoredSnapshot,
    WeightsSnapshot,
    read_tensor,
)
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.redistribute import TensorSpec
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.nn.lora import LORA_A, LORA_B, merged

_MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class FrozenBase:
    """The frozen weights of adapters, and the factor of the adapters' updates."""

    path: str
    """Where they were loaded from; absolute, or a URL."""
    fingerprint: str
    """Of the snapshot in `path`."""
    scale: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a checkpoint records them."""
        return asdict(self)

    def check(self, saved: Any) -> None:
        """Raise CheckpointError unless adapters with the record `saved` are of these weights."""
        recorded = _parse(saved)
        if recorded is None:
            raise CheckpointError("The saved adapters do not record their frozen weights.")
        if recorded.fingerprint != self.fingerprint:
            raise CheckpointError(
                f"The saved adapters belong to the weights in {recorded.path} (fingerprint "
                f"{recorded.fingerprint}), and checkpoint.initial_load_path = {self.path} holds "
                f"others ({self.fingerprint}). Set it to the former or a copy of them, or begin "
                "another run with another job.dump_folder."
            )
        if recorded.scale != self.scale:
            raise CheckpointError(
                f"The saved adapters were trained with a factor of {recorded.scale:g}, and [lora] "
                f"gives {self.scale:g}. Set alpha, rank and use_rslora as they were, or begin "
                "another run with another job.dump_folder."
            )


def recorded_base(snapshot: Snapshot) -> FrozenBase | None:
    """Return the frozen weights that a snapshot's adapters belong to; None if it has all weights.
    Raises CheckpointError if it does not record them."""
    if not adapted_layers(snapshot):
        return None
    recorded = _parse(snapshot.saved.values.get("train_state", {}).get("base"))
    if recorded is None:
        raise CheckpointError(
            f"{snapshot.where} does not record the frozen weights of its adapters."
        )
    return recorded


def adapted_layers(snapshot: Snapshot) -> list[str]:
    """Return the names of the layers that have an adapter in a snapshot."""
    end = f".{LORA_A}"
    return [
        name.removeprefix(_MODEL).removesuffix(end)
        for name in snapshot.tensors
        if name.startswith(_MODEL) and name.endswith(end)
    ]


class MergedSnapshot:
    """Frozen weights, each plus the update of its adapter, as a snapshot of weights."""

    def __init__(self, base: WeightsSnapshot, adapters: StoredSnapshot, scale: float) -> None:
        """`scale` is the factor of the updates. Raises CheckpointError if an adapter belongs to no
        weight of `base`."""
        self._base, self._adapters, self._scale = base, adapters, scale
        self.where = adapters.where
        self.saved = replace(adapters.saved, model_only=True)
        self.tensors: dict[str, TensorSpec] = {
            name: placed for name, placed in base.tensors.items() if name.startswith(_MODEL)
        }
        self._layers = {f"{_MODEL}{name}.weight": name for name in adapted_layers(adapters)}
        if missing := [name for name in self._layers if name not in self.tensors]:
            raise CheckpointError(f"{base.where} has no {missing[0]}, which {self.where} adapts.")

    def fingerprint(self) -> str:
        """Return a digest of base and adapters."""
        parts = [self._base.fingerprint(), self._adapters.fingerprint(), self._scale]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def reach(self, holder: Holder) -> Sequence[int] | None:
        return self._base.reach(holder)

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        weight = self._base.part(name, holder)
        return self._merged(name, holder, weight) if name in self._layers else weight

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        self._base.read_part(name, holder, into)
        if name in self._layers:
            into.copy_(self._merged(name, holder, into))

    def _merged(self, name: str, holder: Holder, weight: torch.Tensor) -> torch.Tensor:
        """Return a holder's part of a weight plus that of its update."""
        if not weight.numel():
            return weight
        placed = self.tensors[name]
        (box,) = placed.layout.boxes(placed.shape, holder)
        rows, columns = box.slices
        layer = f"{_MODEL}{self._layers[name]}"
        a_RI = read_tensor(self._adapters, f"{layer}.{LORA_A}")
        b_OR = read_tensor(self._adapters, f"{layer}.{LORA_B}")
        return merged(weight, a_RI[:, columns], b_OR[rows], self._scale)


def _parse(saved: Any) -> FrozenBase | None:
    kinds = {"path": str, "fingerprint": str, "scale": float}
    if not isinstance(saved, dict) or saved.keys() != kinds.keys():
        return None
    if not all(isinstance(saved[key], kind) for key, kind in kinds.items()):
        return None
    return FrozenBase(**saved)
