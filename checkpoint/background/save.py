"""A rank's share of a save: the replicas that write one checkpoint together, the writing of a part,
and the leader's commit.

All replicas of a group hold the same state, and each writes some of the tensors. In storage, each
rank of each replica is one writer, numbered replica by replica.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_lite.checkpoint.format import BYTES_PER_ELEMENT, parse_writer, tensor_file_name
from torchtitan_lite.checkpoint.history.fencing_tokens import FencingTokens, SupersededError
from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import Announcements, box_entry
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    PartBox,
    Source,
    TokenBucket,
    no_tick,
)
from torchtitan_lite.core.errors import CheckpointError
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
    """Fencing token of the quorum, see `history.fencing_tokens`; 0 without one."""
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

    def check(self, fencing_tokens: FencingTokens | None, leases: Sequence[str]) -> None:
        """Raise SupersededError if others have taken the run over from this replica;
        `fencing_tokens` are those of the run, if it has other replicas, `leases` those of its
        folders. Raises as `FencingTokens.check`."""
        if reason := taken_over(leases):
            raise SupersededError(reason)
        if fencing_tokens is not None:
            fencing_tokens.check(self.fencing_token, is_claimed=self.is_claimed)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "WriterGroup":
        """Parse the form of `to_json`. Raises ValueError or TypeError."""
        group = cls(
            int(values["index"]),
            int(values["count"]),
            str(values["token"]),
            int(values.get("fencing_token", 0)),
            bool(values.get("is_claimed", True)),
        )
        if not 0 <= group.index < group.count:
            raise ValueError(f"replica {group.index} of {group.count}")
        return group

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
        generation_id=writer_group.token,
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


def attempt_token(prefix: str, step: int, attempt: int = 1) -> str:
    """Return the token of an attempt at a step. The prefix is the generation id, or the token of a
    writer group. Trainers and writers derive it equally, so a writer without an order still writes
    its part of the first attempt."""
    return f"{prefix}-{step}x{attempt}"


class RankSave:
    """Writes one rank's parts from its region."""

    def __init__(self, region: Region, storage: Storage) -> None:
        """Raises DamagedSnapshot for an invalid description."""
        self.region, self.storage = region, storage
        self.about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
        self._writes_values = True
        self.fencing_tokens: FencingTokens | None = None
        """Those of the run, if it has other replicas."""
        self.leases: tuple[str, ...] = ()
        """Leases of the run's folders."""
        self.writer_group = SINGLE_REPLICA
        """Replicas that write with this one, and their fencing token."""
        self._announced: set[tuple[int, str]] = set()
        """Step and token of the parts written by this process."""

    def for_group(self, writer_group: WriterGroup) -> "RankSave":
        """Return the save of this region as a member of a writer group."""
        member = copy(self)
        member.about = rank_share(self.about, writer_group)
        member._writes_values = writer_group.index == 0
        member.writer_group = writer_group
        return member

    def complete_slots(self) -> dict[int, int]:
        """Return step -> slot of this rank's complete steps, newest first."""
        return self.region.complete_slots()

    def write(
        self,
        slot: int,
        step: int,
        token: str,
        *,
        direct: bool,
        rate: TokenBucket,
        tick: Callable[[], None] = no_tick,
    ) -> None:
        """Write this rank's part of `step` durably and announce it.

        Parts announced by this process are not written again, because they may be committed.

        Raises CheckpointError if the slot does not hold the step during the whole write, and
        OSError, removing the file, if it cannot be written.
        """
        if (step, token) in self._announced:
            return
        self._require(slot, step)
        about, pool = self.about, self.region.data(slot)
        values = self.region.values(slot) if self._writes_values else {}
        written = write_boxes(
            self.storage, about, step, token, pool, direct=direct, rate=rate, tick=tick
        )
        self._require(slot, step)
        self._store_digests(slot, written)
        part = part_json(about, step, values, written)
        attempts.put_part(self.storage, step, token, about.rank, part)
        self._announced.add((step, token))

    def write_missing(
        self, step: int, token: str, *, direct: bool, tick: Callable[[], None] = no_tick
    ) -> None:
        """Write this rank's part without a rate limit, unless it is present, the step is stored, or
        this rank no longer has it. Raises as `write` does."""
        slot = self.complete_slots().get(step)
        if slot is None or self.about.rank in self.announcements(step, token).parts:
            return
        # In this order: a commit removes announcements after the step is visible.
        if step not in self.storage.steps():
            self.write(slot, step, token, direct=direct, rate=TokenBucket(None), tick=tick)

    def newest_stored(self) -> int:
        """Return the newest stored step that this run may have saved; -1 if none. Raises
        OSError."""
        newest = max(self.complete_slots(), default=-1)
        # Later ones are damaged, or predate a rollback: they do not hold this state.
        return max((step for step in self.storage.steps() if step <= newest), default=-1)

    def possibly_common_steps(self) -> list[int]:
        """Return the complete steps that may be the newest common one, newest first: the confirmed
        one, and later ones. Other ranks may have confirmed one more or one less, but each rank has
        the newest step that any of them confirmed."""
        return [step for step in self.complete_slots() if step >= self.region.confirmed]

    def _store_digests(self, slot: int, written: list[BoxLocation]) -> None:
        """Store the checksums of completely written tensors in the slot, if there is space."""
        whole = {held.name: held.bytes for held in self.about.tensors}
        digests = {
            box.tensor: place.xxh3
            for box, place in zip(self.about.boxes, written, strict=True)
            if box.bytes == whole.get(box.tensor)
        }
        if digests and self.region.is_writable:
            with suppress(ValueError):
                self.region.store_digests(slot, digests)

    def announcements(self, step: int, token: str) -> Announcements:
        """Return what all ranks have announced in an attempt."""
        return attempts.announcements(self.storage, step, token)

    def is_complete(self, announced: Announcements) -> bool:
        """Return whether all ranks have announced their parts."""
        return len(announced.parts) == self.about.world_size

    def commit(self, step: int, token: str, announced: Announcements) -> None:
        """Merge the parts, which must all be announced, and commit the step. For the leader. Raises
        as `check_fencing`."""
        self.check_fencing()
        commit_parts(self.storage, self.about, step, token, announced)

    def check_fencing(self) -> None:
        """Raise SupersededError if others have taken the run over from this replica."""
        self.writer_group.check(self.fencing_tokens, self.leases)

    def _require(self, slot: int, step: int) -> None:
        header = self.region.slots()[slot]
        if header.state != SlotState.COMPLETE or header.step != step:
            raise CheckpointError(
                f"Slot {slot} of {self.region.path} holds step {header.step} "
                f"({header.state.name}), not step {step} complete: it must not change before its "
                "save ends."
            )


def write_boxes(
    storage: Storage,
    about: RegionDescription,
    step: int,
    token: str,
    source: Source,
    **how: Any,
) -> list[BoxLocation]:
    """Write a rank's file if it has boxes; `source` and `how` as in `Storage.write`. Raises
    OSError."""
    boxes = [PartBox(b.tensor, b.dtype, b.size, b.start, b.bytes) for b in about.boxes]
    return storage.write(step, token, about.file_name, boxes, source, **how)


def commit_parts(
    storage: Storage, about: RegionDescription, step: int, token: str, announced: Announcements
) -> None:
    """Merge the parts of all ranks and commit the step, as the leader."""
    parts = [attempts.read_part(storage, announced, rank) for rank in range(about.world_size)]
    leader = parts[about.rank]
    base = {
        "mesh": about.mesh,
        "config": about.config,
        "versions": about.versions,
        "values": leader["values"],
        "model_only": leader["model_only"],
    }
    attempts.commit(storage, step, token, parts, base)


def part_json(
    about: RegionDescription, step: int, values: dict[str, Any], written: list[BoxLocation]
) -> dict[str, Any]:
    """Return a rank's announcement: its boxes, its tensors without elements, and its values
    (`values` and `model_only` from the leader only)."""
    layouts = list(about.file_layouts)
    tensors: dict[str, dict[str, Any]] = {}
    for box, place in zip(about.boxes, written, strict=True):
        entry = tensors.setdefault(
            box.tensor,
            {"dtype": box.dtype, "shape": list(box.shape), "layout": box.layout, "boxes": []},
        )
        entry["boxes"].append(box_entry(box.offset, box.size, about.file_name, place))
    for held in about.tensors:
        if math.prod(held.shape) == 0 and held.name not in tensors:
            layout = about.layouts[held.layout]
            if layout not in layouts:
                layouts.append(layout)
            tensors[held.name] = {
                "dtype": held.dtype,
                "shape": list(held.shape),
                "layout": layouts.index(layout),
                "boxes": [],
            }
    for entry in tensors.values():
        # An empty box would be rejected as overlapping.
        entry["boxes"] = [box for box in entry["boxes"] if math.prod(box["size"])]
    part = {
        "rank": about.rank,
        "step": step,
        "layouts": layouts,
        "tensors": tensors,
        "rng": values.get("rng", {}),
    }
    if about.is_leader:
        part["values"] = values.get("values", {})
        part["model_only"] = bool(values.get("model_only", False))
    return part


def delete_old_checkpoints(
    storage: Storage,
    saved: int,
    *,
    keep_latest_k: int,
    keep_every: int,
    tick: Callable[[], None] = no_tick,
) -> None:
    """Delete checkpoints beyond the retention policy, and leftovers of earlier saves. Errors are
    logged."""
    try:
        attempts.remove_stale_attempts(storage, saved)
        steps = steps_to_delete(
            storage.steps(), saved, keep_latest_k=keep_latest_k, keep_every=keep_every
        )
        for step in steps:
            storage.delete(step, tick)
    except OSError as error:
        log_to_stderr(f"Old checkpoints in {storage.root} could not be deleted: {error}")


def log_to_stderr(message: str) -> None:
    """Print to the trainer's standard error, which may be closed."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def steps_to_delete(
    steps: Iterable[int], saved: int, *, keep_latest_k: int, keep_every: int = 0
) -> list[int]:
    """Return the steps to delete after `saved` was committed, oldest first.

    The newest `keep_latest_k` steps up to `saved` are kept (0: all). Steps divisible by
    `keep_every` are milestones: kept, and not counted. Later steps are damaged or predate a
    rollback: they are neither deleted nor counted. `saved` itself is always kept.
    """
    if keep_latest_k == 0:
        return []
    counted = sorted(
        step for step in set(steps) if step <= saved and not (keep_every and step % keep_every == 0)
    )
    return [step for step in counted[:-keep_latest_k] if step != saved]
