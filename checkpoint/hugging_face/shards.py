"""Which tensors a Hugging Face folder gets, and how they are shared out over its files.

Layer: above pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from torchtitan_lite.checkpoint.hugging_face.folder import WEIGHTS
from torchtitan_lite.checkpoint.hugging_face.pieces import keys_of, rule_of
from torchtitan_lite.redistribute import Placed
from torchtitan_lite.spec import HuggingFaceKey


@dataclass(frozen=True)
class Unit:
    """A tensor of the folder."""

    key: str
    name: str
    """Of the parameter here."""
    row: int | None
    """Which of its rows along dim 0; None: all of it."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file of the folder."""

    file: str
    units: tuple[Unit, ...]

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units)


def units_of(
    rules: Sequence[HuggingFaceKey], tensors: Mapping[str, Placed], dtype: torch.dtype | None
) -> list[list[Unit]]:
    """The tensors that each parameter becomes; of those that do not exist there, none."""
    found = []
    for name, placed in tensors.items():
        rule, numbers = rule_of(rules, name)
        if not rule.forms:
            continue
        shape, kind = placed.shape, dtype or placed.dtype
        keys = keys_of(rule.forms[0], numbers, shape)
        if rule.forms[0].key.count("*") > len(numbers):
            found.append([Unit(key, name, row, shape[1:], kind) for row, key in enumerate(keys)])
        else:
            found.append([Unit(keys[0], name, None, shape, kind)])
    return found


def share_out_units(groups: Sequence[Sequence[Unit]], max_bytes: int) -> list[Shard]:
    """Files of at most `max_bytes`, but for a tensor that is larger. What comes from one parameter
    stays together where it fits, since it is read as a whole."""
    batches = list(_batches(groups, max_bytes))
    if len(batches) == 1:
        return [Shard(WEIGHTS, tuple(batches[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(batches):05d}.safetensors", tuple(batch))
        for number, batch in enumerate(batches, 1)
    ]


def _batches(groups: Sequence[Sequence[Unit]], max_bytes: int) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    size = 0
    for group in groups:
        together = sum(unit.num_bytes for unit in group)
        for unit in group:
            starts = unit is group[0] and together <= max_bytes < size + together
            if batch and (starts or size + unit.num_bytes > max_bytes):
                yield batch
                batch, size = [], 0
            batch.append(unit)
            size += unit.num_bytes
    if batch:
        yield batch
