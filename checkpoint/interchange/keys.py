"""The names and the layout of torchtitan's tensors, and those of ours. Layer: above spec.

torchtitan's model keys stand alone, or after `model.`; those of its optimizer are
`optimizer.state.NAME.SLOT`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.spec import ModelSpec, TorchtitanKey

Release = Literal["0.2", "0.3"]
RELEASES: tuple[Release, ...] = ("0.2", "0.3")

_STATE = "optimizer.state."
_MODEL = "model."


@dataclass(frozen=True)
class Match:
    """A tensor of torchtitan by our name."""

    name: str
    """`model.NAME` or `optimizer.NAME.SLOT`."""
    parameter: str
    """Our name of the parameter."""
    rope_heads: int
    """0: the rows lie as ours do."""

    def of(self, parameter: str) -> "Match":
        """The same of another parameter."""
        name = self.name.replace(self.parameter, parameter, 1)
        return Match(name, parameter, self.rope_heads)


class KeyMap:
    """Between the names of one model."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises CheckpointError for a family that gives no names."""
        if not spec.torchtitan_keys:
            raise CheckpointError(
                f"models/{spec.name}.py gives no names of torchtitan, so its checkpoints cannot be "
                "converted. Set torchtitan_keys in its ModelSpec."
            )
        self._rules = spec.torchtitan_keys
        self._theirs = [
            (_pattern(theirs), rule)
            for rule in self._rules
            for theirs in dict.fromkeys(rule.theirs)
        ]

    def from_theirs(self, key: str) -> Match | None:
        """None for a key that is no tensor of the model or its optimizer."""
        if key.startswith(_STATE):
            # A parameter's name has dots too, and so may not be told from a slot's by them alone.
            name, _, slot = key.removeprefix(_STATE).rpartition(".")
            found = self._parameter(name.removeprefix(_MODEL))
            return found and Match(f"optimizer.{found[0]}.{slot}", found[0], found[1].rope_heads)
        found = self._parameter(key.removeprefix(_MODEL))
        return found and Match(f"model.{found[0]}", found[0], found[1].rope_heads)

    def to_theirs(self, name: str, release: Release) -> tuple[str, int]:
        """The key and the heads of `model.NAME` or `optimizer.NAME.SLOT`. Raises CheckpointError
        for another name."""
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
    """Rows (or elements) of heads whose rotated pairs are neighbours, (2i, 2i + 1), as rows whose
    pairs lie half a head apart; see docs/adr/0003."""
    return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pairs_from_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The way back."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def misfits(
    wanted: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """What keeps tensors of `given` names and shapes from being those of a model."""
    for name in sorted(wanted.keys() - given.keys()):
        yield f"{name} is missing"
    for name, shape in sorted(given.items()):
        if name in wanted and tuple(wanted[name]) != tuple(shape):
            yield f"{name} has shape {list(shape)}, and the model needs {list(wanted[name])}"


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("([0-9]+)".join(map(re.escape, name.split("*"))), re.ASCII)
