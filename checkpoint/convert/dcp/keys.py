"""Mapping between the tensor names and layouts of torchtitan and those of this project.

torchtitan's model keys have no prefix, or `model.`; those of its optimizer are
`optimizer.state.NAME.SLOT`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.nn.spec import ModelSpec, TorchtitanKey

Release = Literal["0.2", "0.3"]
RELEASES: tuple[Release, ...] = ("0.2", "0.3")

_STATE = "optimizer.state."
_MODEL = "model."


@dataclass(frozen=True)
class KeyMatch:
    """A tensor of torchtitan under this project's name."""

    name: str
    """`model.NAME` or `optimizer.NAME.SLOT`."""
    parameter: str
    """Name of the parameter here."""
    rope_heads: int
    """Number of heads whose rows need reordering for RoPE; 0 if none."""

    def of(self, parameter: str) -> "KeyMatch":
        """Return the same match for another parameter."""
        name = self.name.replace(self.parameter, parameter, 1)
        return KeyMatch(name, parameter, self.rope_heads)


class KeyMap:
    """Bidirectional mapping of one model's names."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises CheckpointError for a family without torchtitan names."""
        if not spec.torchtitan_keys:
            raise CheckpointError(
                f"models/{spec.name}.py has no torchtitan names, so its checkpoints cannot be "
                "converted. Set torchtitan_keys in its ModelSpec."
            )
        self._rules = spec.torchtitan_keys
        self._theirs = [
            (_pattern(theirs), rule)
            for rule in self._rules
            for theirs in dict.fromkeys(rule.theirs)
        ]

    def from_torchtitan(self, key: str) -> KeyMatch | None:
        """Return the match of a key; None if it is not a tensor of the model or its optimizer."""
        if key.startswith(_STATE):
            # Parameter names contain dots, too, so the slot is the last component.
            name, _, slot = key.removeprefix(_STATE).rpartition(".")
            match = self._parameter(name.removeprefix(_MODEL))
            return match and KeyMatch(f"optimizer.{match[0]}.{slot}", match[0], match[1].rope_heads)
        match = self._parameter(key.removeprefix(_MODEL))
        return match and KeyMatch(f"model.{match[0]}", match[0], match[1].rope_heads)

    def to_torchtitan(self, name: str, release: Release) -> tuple[str, int]:
        """Return the key and the number of RoPE heads of `model.NAME` or `optimizer.NAME.SLOT`.
        Raises CheckpointError for other names."""
        part, _, rest = name.partition(".")
        parameter, slot = rest, ""
        if part == "optimizer":
            parameter, _, slot = rest.rpartition(".")
        for rule in self._rules:
            match = _pattern(rule.name).fullmatch(parameter)
            if match and part in ("model", "optimizer"):
                theirs = rule.theirs[min(RELEASES.index(release), len(rule.theirs) - 1)]
                for number in match.groups():
                    theirs = theirs.replace("*", number, 1)
                return (theirs if not slot else f"{_STATE}{theirs}.{slot}"), rule.rope_heads
        raise CheckpointError(f"{name} has no name in torchtitan.")

    def _parameter(self, key: str) -> tuple[str, TorchtitanKey] | None:
        for pattern, rule in self._theirs:
            match = pattern.fullmatch(key)
            if match:
                name = rule.name
                for number in match.groups():
                    name = name.replace("*", number, 1)
                return name, rule
        return None


def halves_from_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows (or elements) of heads from interleaved rotary pairs, (2i, 2i + 1), to pairs
    half a head apart; see docs/adr/0003."""
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pairs_from_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Invert `halves_from_pairs`."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def shape_mismatches(
    wanted: Mapping[str, Sequence[int]], stored: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Yield the reasons why tensors of `stored` names and shapes are not those of the model."""
    for name in sorted(wanted.keys() - stored.keys()):
        yield f"{name} is missing"
    for name, shape in sorted(stored.items()):
        if name in wanted and tuple(wanted[name]) != tuple(shape):
            yield f"{name} has shape {list(shape)}, and the model needs {list(wanted[name])}"


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("([0-9]+)".join(map(re.escape, name.split("*"))), re.ASCII)
