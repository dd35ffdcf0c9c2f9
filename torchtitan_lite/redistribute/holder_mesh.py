"""Who holds parts of a tensor: an array of holders with named axes.

A holder is a rank, or anything else that can hold a part of a tensor: a file, a snapshot, a peer.
Layer: above errors.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.errors import LayoutError

Holder = Hashable
"""A rank's number, or the name of whatever else holds a part."""


@dataclass(frozen=True)
class HolderMesh:
    """Holders in an array with named axes."""

    shape: tuple[int, ...]
    holders: tuple[Holder, ...]
    """In the array's order, the last axis varying fastest."""
    axes: tuple[str, ...] = ()
    """Their names; `axis0`, `axis1` and so on where none are given."""

    def __post_init__(self) -> None:
        if not self.axes:
            names = tuple(f"axis{number}" for number in range(len(self.shape)))
            object.__setattr__(self, "axes", names)
        if math.prod(self.shape) != len(self.holders) or min(self.shape, default=1) < 1:
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {math.prod(self.shape)} holders, and "
                f"{len(self.holders)} were given."
            )
        if len(set(self.holders)) != len(self.holders):
            twice, _ = Counter(self.holders).most_common(1)[0]
            raise LayoutError(f"Holder {twice} is twice in the mesh {self}. List each once.")
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.shape):
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {len(self.shape)} different axis names, and "
                f"{self.axes} were given."
            )
        object.__setattr__(self, "_hash", hash((self.shape, self.holders, self.axes)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> tuple[object, ...]:
        # Another process has other hashes of strings.
        return HolderMesh, (self.shape, self.holders, self.axes)

    def __str__(self) -> str:
        sizes = " x ".join(f"{a} {n}" for a, n in zip(self.axes, self.shape, strict=True))
        if self.holders == tuple(range(len(self.holders))):
            return f"({sizes or 'one holder'})"
        shown = ", ".join(map(str, self.holders[:8])) + (", …" if len(self.holders) > 8 else "")
        return f"({sizes or 'one holder'} of {shown})"

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(mesh: DeviceMesh) -> "HolderMesh":
        """The ranks of a DeviceMesh."""
        return HolderMesh(
            tuple(mesh.mesh.shape),
            tuple(mesh.mesh.flatten().tolist()),
            tuple(mesh.mesh_dim_names or ()),
        )

    @staticmethod
    def ranks(*shape: int, first: int = 0) -> "HolderMesh":
        """Consecutive ranks from `first` on."""
        return HolderMesh(shape, tuple(range(first, first + math.prod(shape))))

    @cached_property
    def _places(self) -> dict[Holder, int]:
        return {holder: place for place, holder in enumerate(self.holders)}

    def place(self, holder: Holder) -> int | None:
        """A holder's index in `holders`; None where it is not among them."""
        return self._places.get(holder)

    def at(self, coordinate: Sequence[int]) -> Holder:
        """The holder at an index on each axis."""
        place = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            place = place * size + index
        return self.holders[place]

    def along(self, axes: Sequence[int], coordinate: Sequence[int]) -> list[Holder]:
        """The holders that differ from the one at `coordinate` along `axes` only, itself included;
        the first of `axes` varies slowest."""
        found = []
        for moved in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            index = dict(zip(axes, moved, strict=True))
            found.append(self.at([index.get(axis, at) for axis, at in enumerate(coordinate)]))
        return found

    def coordinate(self, holder: Holder) -> tuple[int, ...] | None:
        """A holder's index on each axis; None where it is not in the mesh."""
        place = self.place(holder)
        if place is None:
            return None
        coordinate = []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))
