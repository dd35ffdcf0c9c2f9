"""What runs have left in shared memory, as a table, and freeing it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.memory.folder import Run, free, regions_in, runs
from torchtitan_lite.checkpoint.memory.region import Region, State
from torchtitan_lite.errors import DamagedSnapshot


def left(base: Path) -> list[dict[str, Any]]:
    """What each run of this user has in shared memory: a dict of JSON values each."""
    return [_record(run) for run in runs(base=base)]


def free_left(run_id: str, base: Path) -> list[str]:
    """Free what a run has left, or, for "", what all have for which nobody writes; their ids.

    Raises CheckpointError when there is no such run, or a process still writes for it.
    """
    ids = [run_id] if run_id else [run.run_id for run in runs(base=base) if not run.owners]
    for one in ids:
        free(one, base=base)
    return ids


def left_in_words(found: Sequence[Mapping[str, Any]], freed: Sequence[str]) -> str:
    """For people."""
    lines = [f"Freed run {run_id}." for run_id in freed]
    for run in found:
        lines += [
            f"run {run['run_id']}",
            f"  {run['bytes'] / 2**20:,.1f} MiB of {len(run['ranks'])} ranks",
            f"  of the checkpoints in {run['root'] or 'an unknown place'}",
            f"  steps that all these ranks have: {', '.join(map(str, run['steps'])) or 'none'}",
            *(
                f"  rank {rank} is used by process {pid or 'unknown'}"
                for rank, pid in run["writers"].items()
            ),
        ]
    return "\n".join(lines or ["No run has anything in shared memory."])


def _record(run: Run) -> dict[str, Any]:
    roots: set[str] = set()
    steps: list[set[int]] = []
    for path in regions_in(run.path).values():
        # One that is damaged has no step.
        held: set[int] = set()
        with suppress(DamagedSnapshot):
            region = Region.open(path)
            roots.add(str(region.description.get("root")))
            held = {slot.step for slot in region.slots() if slot.state == State.COMPLETE}
            region.close()
        steps.append(held)
    return {
        "run_id": run.run_id,
        "root": ", ".join(sorted(roots)),
        "steps": sorted(set.intersection(*steps)) if steps else [],
        "bytes": run.bytes,
        "ranks": list(run.ranks),
        "writers": {str(rank): owner for rank, owner in run.owners.items()},
    }
