"""Who writes a checkpoint together: replicas that hold the same state, each of which writes some of
its tensors. Layer: above memory.

To storage, a rank of a replica is one writer of all that there are, numbered replica by replica.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_lite.checkpoint.file_names import file_name, writer_of
from torchtitan_lite.checkpoint.memory.description import (
    BYTES_PER_ELEMENT,
    Description,
    HeldTensor,
)


@dataclass(frozen=True)
class Coworkers:
    """This replica among those that write together."""

    index: int = 0
    count: int = 1
    token: str = ""
    """Hexadecimal digits that tell these replicas, and the time in which they train together, from
    all others; the same on each of them. Empty where one writes alone."""
    alike: bool = True
    """All hold the same at this moment: what is saved is not one replica's own."""

    @property
    def together(self) -> "Coworkers":
        """Those with whom this one writes."""
        return self if self.token else ALONE

    @property
    def writes(self) -> bool:
        """Whether it writes at all: without a token the first does so for all."""
        return self.index == 0 or bool(self.token)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Coworkers":
        """What `to_json` gave. Raises ValueError or TypeError."""
        found = cls(int(given["index"]), int(given["count"]), str(given["token"]))
        if not 0 <= found.index < found.count:
            raise ValueError(f"replica {found.index} of {found.count}")
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


ALONE = Coworkers()


def share_of(about: Description, coworkers: Coworkers) -> Description:
    """What a rank writes when its replica has coworkers, as if all ranks of all of them were the
    ranks of one run."""
    if coworkers.count == 1:
        return about
    first = coworkers.index * about.world_size
    owners = owners_of(about.tensors, coworkers.count)
    return replace(
        about,
        session=coworkers.token,
        rank=first + about.rank,
        world_size=about.world_size * coworkers.count,
        is_leader=about.is_leader and coworkers.index == 0,
        file_name=file_name(first + about.rank),
        file_layouts=tuple(_moved(layout, first) for layout in about.file_layouts),
        boxes=tuple(box for box in about.boxes if owners[box.tensor] == coworkers.index),
    )


def owners_of(tensors: Iterable[HeldTensor], count: int) -> dict[str, int]:
    """Tensor -> the replica that writes it, so that all write about as much: the largest first,
    each to who has least. A function of names, shapes and dtypes, which all replicas have alike."""
    sizes = {held.name: math.prod(held.shape) * BYTES_PER_ELEMENT[held.dtype] for held in tensors}
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = min(range(count), key=loads.__getitem__)
        loads[owners[name]] += sizes[name]
    return owners


def _moved(layout: Any, first: int) -> Any:
    """A layout whose holders are files of the ranks of one replica, in those of the replica that
    begins at rank `first`."""
    files = [file_name(first + writer_of(file)) for file in layout["mesh"]["holders"]]
    return {**layout, "mesh": {**layout["mesh"], "holders": files}}
