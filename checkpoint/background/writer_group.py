"""The replicas that write one checkpoint together: all hold the same state, and each writes some of
the tensors.

In storage, each rank of each replica is one writer, numbered replica by replica.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_lite.checkpoint.format import BYTES_PER_ELEMENT, parse_writer, tensor_file_name
from torchtitan_lite.checkpoint.history.fencing_tokens import RunHistory, SupersededError
from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.core.run_lease import taken_over


@dataclass(frozen=True)
class WriterGroup:
    """Position of this replica among those that write together."""

    index: int = 0
    count: int = 1
    token: str = ""
    """Hexadecimal digits, equal on all replicas of the group and unique to the period in which they
    train together. Empty if one replica writes alone."""
    fencing_token: int = 0
    """Fencing token of the quorum, see `history`; 0 without one."""
    is_claimed: bool = True
    """Whether that token is the quorum's own, and not one under which it continues."""
    same_state: bool = True
    """Whether all replicas hold the same state now, so that a save is not specific to one of
    them."""

    @property
    def active(self) -> "WriterGroup":
        """The group that writes together: this one, or a single replica without a token."""
        return self if self.token else self.alone

    @property
    def alone(self) -> "WriterGroup":
        """A single replica with the same right to write."""
        return WriterGroup(fencing_token=self.fencing_token, is_claimed=self.is_claimed)

    @property
    def writes(self) -> bool:
        """Whether this replica writes: without a token only the first does, for all."""
        return self.index == 0 or bool(self.token)

    def check(self, history: RunHistory | None, leases: Sequence[str]) -> None:
        """Raise SupersededError if others have taken the run over from this replica; `history` is
        that of the run, if it has other replicas, `leases` those of its folders. Raises as
        `RunHistory.check`."""
        if reason := taken_over(leases):
            raise SupersededError(reason)
        if history is not None:
            history.check(self.fencing_token, is_claimed=self.is_claimed)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "WriterGroup":
        """Parse the form of `to_json`. Raises ValueError or TypeError."""
        found = cls(
            int(given["index"]),
            int(given["count"]),
            str(given["token"]),
            int(given.get("fencing_token", 0)),
            bool(given.get("is_claimed", True)),
        )
        if not 0 <= found.index < found.count:
            raise ValueError(f"replica {found.index} of {found.count}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        return asdict(self)


SINGLE_REPLICA = WriterGroup()


def rank_share(about: RegionDescription, writer_group: WriterGroup) -> RegionDescription:
    """Return a rank's share of the writes, as if all ranks of all replicas were ranks of one
    run."""
    if writer_group.count == 1:
        return about
    first = writer_group.index * about.world_size
    owners = assign_tensors(about.tensors, writer_group.count)
    return replace(
        about,
        session=writer_group.token,
        rank=first + about.rank,
        world_size=about.world_size * writer_group.count,
        is_leader=about.is_leader and writer_group.index == 0,
        file_name=tensor_file_name(first + about.rank),
        file_layouts=tuple(_moved(layout, first) for layout in about.file_layouts),
        boxes=tuple(box for box in about.boxes if owners[box.tensor] == writer_group.index),
    )


def assign_tensors(tensors: Iterable[HeldTensor], count: int) -> dict[str, int]:
    """Return tensor -> replica that writes it, balanced greedily by size. A pure function of names,
    shapes and dtypes, so all replicas compute the same."""
    sizes = {held.name: math.prod(held.shape) * BYTES_PER_ELEMENT[held.dtype] for held in tensors}
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = min(range(count), key=loads.__getitem__)
        loads[owners[name]] += sizes[name]
    return owners


def _moved(layout: Any, first: int) -> Any:
    """Rename the files of a layout from those of the first replica to those of the replica
    beginning at rank `first`."""
    files = [tensor_file_name(first + parse_writer(file)) for file in layout["mesh"]["holders"]]
    return {**layout, "mesh": {**layout["mesh"], "holders": files}}
