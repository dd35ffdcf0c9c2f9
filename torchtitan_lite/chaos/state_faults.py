"""Checkpoints and snapshots that are damaged, lost, or cannot be written. Layer: above
process_faults.

After most of them all replicas die, so that what is left has to be used.
"""

import resource
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

from torchtitan_lite.chaos.kind import Kind, Target, kinds_of
from torchtitan_lite.chaos.process_faults import all_replicas_killed, rank_killed
from torchtitan_lite.chaos.scene import Missed

_HEAD_BYTES = 128
_FULL_S = 3.0
_SAVE_S = 60.0
_WRITERS_S = 30.0
_START_S = 90.0
_SMALL_BYTES = 16 << 20
"""Less than a snapshot, and more than all else that a rank writes by itself."""
_WITHOUT = "Snapshots are disabled"


def killed_in_the_middle_of_a_save(target: Target) -> None:
    scene = target.scene

    def under_way() -> bool:
        return any((scene.folder / "checkpoint").glob(".writing-*"))

    scene.wait_until(under_way, "a save", _SAVE_S)
    rank_killed(target)


def newest_checkpoint_damaged(target: Target) -> None:
    """Bits of its newest file turn over on the disk, and memory is lost."""
    _without_memory(target)
    files = sorted(_newest(target).glob("*.safetensors"))
    _damage(target.draw.choice(files), target)


def newest_checkpoint_cut_short(target: Target) -> None:
    """As on a filesystem that has lost what it had promised to keep."""
    _without_memory(target)
    file = target.draw.choice(sorted(_newest(target).glob("*.safetensors")))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def newest_checkpoint_lost(target: Target) -> None:
    _without_memory(target)
    shutil.rmtree(_newest(target))


def manifest_damaged(target: Target) -> None:
    _without_memory(target)
    _damage(_newest(target) / "manifest.json", target)


def memory_lost(target: Target) -> None:
    """As when a machine starts anew: only checkpoints are left."""
    _without_memory(target)


def memory_damaged(target: Target) -> None:
    """What tells a replica's snapshots turns bad while nobody looks after them. The numbers in them
    are as safe as any in memory: they have no checksum of their own."""
    regions = target.scene.snapshots(target.replica)
    if not regions:
        raise Missed("no snapshot is there")
    _kill_with_writers(target)
    for region in regions:
        with suppress(FileNotFoundError):
            _damage(region, target, within=_HEAD_BYTES)


def shared_memory_full(target: Target) -> None:
    """A replica that starts finds no place for its snapshots, trains on without, and starts again.
    What its processes may write is limited instead: others use the same memory."""
    scene, replica = target.scene, target.replica
    before = {rank.pid for rank in scene.ranks(replica)}
    victims = [*scene.ranks(replica), *scene.writers(replica)]
    _kill(victims)
    for region in scene.snapshots(replica):
        region.unlink(missing_ok=True)

    def started() -> list[psutil.Process]:
        found = [one for one in scene.ranks(replica) if one.pid not in before]
        return found if len(found) == len(before) else []

    for rank in scene.wait_until(started, "new ranks", _START_S):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (_SMALL_BYTES, _SMALL_BYTES))
    scene.wait_until(lambda: _WITHOUT in scene.log(replica), "a run without snapshots", _START_S)
    rank_killed(target)


def storage_full(target: Target) -> None:
    """Nothing can be written for a while."""
    writers = target.scene.writers(target.replica)
    if not writers:
        raise Missed("no writer is there")
    before = {}
    try:
        for writer in writers:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                before[writer.pid] = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
                hard = before[writer.pid][1]
                resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, hard))
        time.sleep(_FULL_S)
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


KINDS: dict[str, Kind] = kinds_of(
    killed_in_the_middle_of_a_save,
    newest_checkpoint_damaged,
    newest_checkpoint_cut_short,
    newest_checkpoint_lost,
    manifest_damaged,
    memory_lost,
    memory_damaged,
    shared_memory_full,
    storage_full,
)


def _newest(target: Target) -> Path:
    stored = target.scene.stored()
    # The only one there is has nothing before it.
    if len(stored) < 2:
        raise Missed("fewer than two checkpoints are stored")
    return stored[-1]


def _without_memory(target: Target) -> None:
    """All replicas die at once, and what they held in shared memory goes."""
    _newest(target)
    _kill_with_writers(target)
    for replica in range(target.scene.num_replicas):
        for region in target.scene.snapshots(replica):
            region.unlink(missing_ok=True)


def _kill_with_writers(target: Target) -> None:
    scene = target.scene
    writers = [one for number in range(scene.num_replicas) for one in scene.writers(number)]
    all_replicas_killed(target)
    _kill(writers)


def _kill(processes: list[psutil.Process]) -> None:
    """And wait for their end."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    _, left = psutil.wait_procs(processes, timeout=_WRITERS_S)
    if left:
        raise Missed("a process would not end")


def _damage(path: Path, target: Target, within: int | None = None) -> None:
    """Turn the bits of one byte over, of the first `within`."""
    with path.open("r+b") as opened:
        place = target.draw.randrange(within or path.stat().st_size)
        opened.seek(place)
        byte = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte[0] ^ 0xFF]))
