"""One rank's share of a save: its part, and for the leader the commit. Layer: above memory and
storage.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any

from torchtitan_lite.checkpoint.background.coworkers import Coworkers, share_of
from torchtitan_lite.checkpoint.memory.description import Description
from torchtitan_lite.checkpoint.memory.region import Region, State
from torchtitan_lite.checkpoint.storage.manifest_json import (
    box_entry,
    build_manifest,
    manifest_bytes,
)
from torchtitan_lite.checkpoint.storage.part_file import PartBox, Written, nothing
from torchtitan_lite.checkpoint.storage.rate import TokenBucket
from torchtitan_lite.checkpoint.storage.retention import to_delete
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.errors import CheckpointError


def attempt_token(session: str, step: int, attempt: int = 1) -> str:
    """Tells an attempt at a step from all others: it begins with what tells this start of the run
    from others. Trainers and writers name it alike, so that who was never told of a save still
    writes its part of the first attempt."""
    return f"{session}-{step}x{attempt}"


class RankSave:
    """Writes the parts of one rank from its region."""

    def __init__(self, region: Region, storage: Storage) -> None:
        """Raises DamagedSnapshot when the region's description is wrong."""
        self.region, self.storage = region, storage
        self.about = Description.from_dict(region.description, slot_bytes=region.slot_bytes)
        self._tells_values = True
        self._announced: set[tuple[int, str]] = set()
        """Step and token of the parts written here."""

    def among(self, coworkers: Coworkers) -> "RankSave":
        """What is to be written of the same region when this replica has coworkers."""
        found = copy(self)
        found.about = share_of(self.about, coworkers)
        found._tells_values = coworkers.index == 0
        return found

    def complete_slots(self) -> dict[int, int]:
        """Step -> slot, for the steps that this rank holds whole, newest first."""
        return self.region.complete_slots()

    def write(
        self,
        slot: int,
        step: int,
        token: str,
        *,
        direct: bool,
        rate: TokenBucket,
        tick: Callable[[], None] = nothing,
    ) -> None:
        """Write this rank's part of `step` durably and announce it.

        What this process has announced already is not touched: it may be committed by now.

        Raises CheckpointError when the slot does not hold the step for as long as it takes, and
        OSError when it cannot be written; then the file is removed.
        """
        if (step, token) in self._announced:
            return
        self._require(slot, step)
        about, pool = self.about, self.region.data(slot)
        values = self.region.values(slot) if self._tells_values else {}
        written = write_boxes(
            self.storage, about, step, token, pool, direct=direct, rate=rate, tick=tick
        )
        self._require(slot, step)
        self._stamp(slot, written)
        self.storage.put_part(step, token, about.rank, part_of(about, step, values, written))
        self._announced.add((step, token))

    def write_missing(
        self, step: int, token: str, *, direct: bool, tick: Callable[[], None] = nothing
    ) -> None:
        """Write this rank's part, as fast as it goes, unless it is there, the step is stored, or
        this rank has it no more. Raises as `write` does."""
        slot = self.complete_slots().get(step)
        if slot is None or self.about.rank in self.storage.parts_present(step, token):
            return
        # In this order: a commit takes the words of parts away once the step is seen.
        if step not in self.storage.steps():
            self.write(slot, step, token, direct=direct, rate=TokenBucket(None), tick=tick)

    def newest_stored(self) -> int:
        """The newest step on storage that this run may have saved; -1 for none. Raises OSError."""
        newest = max(self.complete_slots(), default=-1)
        # Later ones are damaged, or of a run that was taken back: they do not hold this state.
        return max((step for step in self.storage.steps() if step <= newest), default=-1)

    def perhaps_common(self) -> list[int]:
        """The complete steps among which the newest is that all ranks have, newest first: that
        which this rank knows all to have, and later ones. Others may know of one more or one
        less, but each has the newest that any of them knows of."""
        return [step for step in self.complete_slots() if step >= self.region.confirmed]

    def _stamp(self, slot: int, written: list[Written]) -> None:
        """Keep the checksums that were computed anyway with the slot, of the parts that this rank
        has written whole. Where there is no room for them, they are left out."""
        whole = {held.name: held.bytes for held in self.about.tensors}
        digests = {
            box.tensor: place.xxh3
            for box, place in zip(self.about.boxes, written, strict=True)
            if box.bytes == whole.get(box.tensor)
        }
        if digests and self.region.is_writable:
            with suppress(ValueError):
                self.region.stamp(slot, digests)

    def commit(self, step: int, token: str) -> None:
        """Join the parts, all of which must be present, and make the step seen. For the leader."""
        commit_parts(self.storage, self.about, step, token)

    def is_whole(self, step: int, token: str) -> bool:
        """Whether all ranks have announced their parts."""
        return len(self.storage.parts_present(step, token)) == self.about.world_size

    def _require(self, slot: int, step: int) -> None:
        header = self.region.slots()[slot]
        if header.state != State.COMPLETE or header.step != step:
            raise CheckpointError(
                f"Slot {slot} of {self.region.path} holds step {header.step} "
                f"({header.state.name}), not step {step} complete: it must not change before its "
                "save ends."
            )


def write_boxes(
    storage: Storage,
    about: Description,
    step: int,
    token: str,
    source: memoryview | list[memoryview],
    **how: Any,
) -> list[Written]:
    """Write a rank's file, where it has boxes to write; `source` and `how` as in
    `Storage.write_part`. Raises OSError."""
    boxes = [PartBox(b.tensor, b.dtype, b.size, b.start, b.bytes) for b in about.boxes]
    storage.begin(step, token)
    if not boxes:
        return []
    return storage.write_part(step, token, about.file_name, boxes, source, **how)


def commit_parts(storage: Storage, about: Description, step: int, token: str) -> None:
    """Join the parts of all ranks, as the leader, and make the step seen."""
    parts = [storage.read_part(step, token, rank) for rank in range(about.world_size)]
    leader = parts[about.rank]
    base = {
        "mesh": about.mesh,
        "config": about.config,
        "versions": about.versions,
        "values": leader["values"],
        "model_only": leader["model_only"],
    }
    storage.commit(step, token, manifest_bytes(build_manifest(step, parts, base)))


def part_of(
    about: Description, step: int, values: dict[str, Any], written: list[Written]
) -> dict[str, Any]:
    """What a rank announces: the boxes that it wrote, the tensors of its own that have no element,
    and its share of the values (`values` and `model_only` only from the leader)."""
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
        # A box without elements says nothing, and would be read as overlapping others.
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


def delete_old(
    storage: Storage,
    saved: int,
    *,
    keep_latest_k: int,
    keep_every: int,
    tick: Callable[[], None] = nothing,
) -> None:
    """Delete what need not stay after `saved`, and leavings of saves before it. What cannot be
    deleted is reported and stays."""
    try:
        storage.tidy(saved)
        steps = to_delete(
            storage.steps(), saved, keep_latest_k=keep_latest_k, keep_every=keep_every
        )
        for step in steps:
            storage.delete(step, tick)
    except OSError as error:
        report(f"Old checkpoints in {storage.root} could not be deleted: {error}")


def report(message: str) -> None:
    """Tell whoever reads the trainer's standard error, which may be gone."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
