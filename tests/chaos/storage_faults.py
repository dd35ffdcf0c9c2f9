"""Checkpoints and snapshots that are corrupted, lost, or cannot be written.

After most of these faults all replicas die, so that the job must resume from what is left.
"""

import resource
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.job_view import FaultNotApplicable, FaultTarget
from tests.chaos.process_faults import all_replicas_killed, kill_all, rank_killed

_HEAD_BYTES = 128
_FULL_S = 3.0
_SAVE_S = 60.0
_EXIT_S = 30.0
_START_S = 90.0
_SMALL_BYTES = 16 << 20
"""Less than a snapshot, but more than any other file that a rank writes itself."""
_SNAPSHOTS_DISABLED = "Snapshots are disabled"


def rank_killed_during_save(target: FaultTarget) -> None:
    job = target.job

    def saving() -> bool:
        return any((job.folder / "checkpoint").glob(".writing-*"))

    job.wait_until(saving, "a save", _SAVE_S)
    rank_killed(target)


def newest_checkpoint_corrupted(target: FaultTarget) -> None:
    """Flip bits in a file of the newest checkpoint, and lose all snapshots."""
    _lose_snapshots(target)
    files = sorted(_newest_checkpoint(target).glob("*.safetensors"))
    _flip_bits(target.rng.choice(files), target)


def newest_checkpoint_truncated(target: FaultTarget) -> None:
    """Truncate a file, as a filesystem that lost data it had acknowledged."""
    _lose_snapshots(target)
    file = target.rng.choice(sorted(_newest_checkpoint(target).glob("*.safetensors")))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def newest_checkpoint_lost(target: FaultTarget) -> None:
    _lose_snapshots(target)
    shutil.rmtree(_newest_checkpoint(target))


def manifest_corrupted(target: FaultTarget) -> None:
    _lose_snapshots(target)
    _flip_bits(_newest_checkpoint(target) / "manifest.json", target)


def snapshots_lost(target: FaultTarget) -> None:
    """Lose all snapshots, as when a machine reboots: only checkpoints are left."""
    _lose_snapshots(target)


def snapshot_headers_corrupted(target: FaultTarget) -> None:
    """Flip bits in the headers of a replica's snapshots while all replicas are down. Tensors in
    memory have no checksum, so they are not touched."""
    regions = target.job.snapshots(target.replica)
    if not regions:
        raise FaultNotApplicable("no snapshot exists")
    _kill_ranks_and_writers(target)
    for region in regions:
        with suppress(FileNotFoundError):
            _flip_bits(region, target, within=_HEAD_BYTES)


def shared_memory_full(target: FaultTarget) -> None:
    """Leave a starting replica no space for snapshots: it trains without them, then restarts.
    A limit on file sizes emulates the full shared memory, which other processes use too."""
    job, replica = target.job, target.replica
    before = {rank.pid for rank in job.ranks(replica)}
    _kill_and_wait([*job.ranks(replica), *job.writers(replica)])
    for region in job.snapshots(replica):
        region.unlink(missing_ok=True)

    def new_ranks() -> list[psutil.Process]:
        ranks = [rank for rank in job.ranks(replica) if rank.pid not in before]
        return ranks if len(ranks) == len(before) else []

    for rank in job.wait_until(new_ranks, "new ranks", _START_S):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (_SMALL_BYTES, _SMALL_BYTES))
    job.wait_until(
        lambda: _SNAPSHOTS_DISABLED in job.log(replica), "a run without snapshots", _START_S
    )
    rank_killed(target)


def storage_full(target: FaultTarget) -> None:
    """Fail all writes of checkpoints for some seconds."""
    writers = target.job.writers(target.replica)
    if not writers:
        raise FaultNotApplicable("no checkpoint writer is running")
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


FAULTS = (
    rank_killed_during_save,
    newest_checkpoint_corrupted,
    newest_checkpoint_truncated,
    newest_checkpoint_lost,
    manifest_corrupted,
    snapshots_lost,
    snapshot_headers_corrupted,
    shared_memory_full,
    storage_full,
)


def _newest_checkpoint(target: FaultTarget) -> Path:
    checkpoints = target.job.checkpoints()
    # The only checkpoint has no predecessor to fall back to.
    if len(checkpoints) < 2:
        raise FaultNotApplicable("fewer than two checkpoints exist")
    return checkpoints[-1]


def _lose_snapshots(target: FaultTarget) -> None:
    """Kill all replicas at once and delete their snapshots."""
    _newest_checkpoint(target)
    _kill_ranks_and_writers(target)
    for replica in range(target.job.num_replicas):
        for region in target.job.snapshots(replica):
            region.unlink(missing_ok=True)


def _kill_ranks_and_writers(target: FaultTarget) -> None:
    job = target.job
    writers = [writer for number in range(job.num_replicas) for writer in job.writers(number)]
    all_replicas_killed(target)
    _kill_and_wait(writers)


def _kill_and_wait(processes: list[psutil.Process]) -> None:
    kill_all(processes)
    _, alive = psutil.wait_procs(processes, timeout=_EXIT_S)
    if alive:
        raise FaultNotApplicable(f"a killed process did not exit within {_EXIT_S:g} s")


def _flip_bits(path: Path, target: FaultTarget, within: int | None = None) -> None:
    """Invert one byte, chosen from the first `within` bytes."""
    with path.open("r+b") as opened:
        position = target.rng.randrange(within or path.stat().st_size)
        opened.seek(position)
        byte = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte[0] ^ 0xFF]))
