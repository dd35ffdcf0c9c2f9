"""The folder of a run in shared memory, and what runs have left there.

`/dev/shm/torchtitan_lite-UID/RUN_ID` holds per rank `rank-R.snapshots` and `rank-R.lock`.
Invariant: only folders that this user owns and nobody else may read are used. Layer: above lock.
"""

import fcntl
import os
import re
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.memory.lock import RankLock
from torchtitan_lite.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SNAPSHOTS = re.compile(r"rank-([0-9]{5})\.snapshots", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run holds in shared memory."""

    run_id: str
    path: Path
    bytes: int
    ranks: tuple[int, ...]
    owners: dict[int, int]
    """Rank -> process that holds its lock now; 0 where the process is not known."""


def run_folder(run_id: str, *, base: Path = SHARED_MEMORY) -> Path:
    """The folder of a run, made if it is missing.

    Raises CheckpointError when `run_id` is not 32 hexadecimal digits, or when a folder on the way
    belongs to another user, can be read by others or is a link.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise CheckpointError(f"Run id {run_id!r} is not 32 digits of 0-9 and a-f.")
    folder = _user_folder(base)
    for path in (folder, folder / run_id):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            _require_private(path)
        else:
            # The umask may have taken rights away.
            os.chmod(path, 0o700)
    return folder / run_id


def regions_in(folder: Path) -> dict[int, Path]:
    """The snapshot files of a run's folder by rank."""
    found: dict[int, Path] = {}
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        # Another process has removed it, with all that was in it.
        return found
    for name in names:
        match = _SNAPSHOTS.fullmatch(name)
        if match:
            found[int(match[1])] = folder / name
    return dict(sorted(found.items()))


def known_folder(run_id: str, *, base: Path = SHARED_MEMORY) -> Path | None:
    """The folder of a run that has one. Raises CheckpointError as `run_folder` does."""
    if not os.path.lexists(_user_folder(base) / run_id):
        return None
    return run_folder(run_id, base=base)


def remove_regions(run_id: str, *, keep: Container[int] = (), base: Path = SHARED_MEMORY) -> None:
    """Remove the snapshot files of all ranks but `keep`, which nobody needs any more, and a folder
    that is empty then. Several processes may do it at once. Raises CheckpointError as `run_folder`
    does."""
    folder = known_folder(run_id, base=base)
    if folder is None:
        return
    for rank, path in regions_in(folder).items():
        if rank not in keep:
            path.unlink(missing_ok=True)
    if not keep:
        # Writers that still end have their locks in it.
        with suppress(OSError):
            folder.rmdir()


def runs(*, base: Path = SHARED_MEMORY) -> list[Run]:
    """All runs of this user that hold shared memory, in the order of their ids."""
    folder = _user_folder(base)
    if not os.path.lexists(folder):
        return []
    _require_private(folder)
    found = []
    for path in sorted(folder.iterdir()):
        if not _RUN_ID.fullmatch(path.name) or not path.is_dir():
            continue
        regions = regions_in(path)
        owners = {rank: RankLock(path, rank).owner() for rank in _locked_ranks(path)}
        found.append(
            Run(
                run_id=path.name,
                path=path,
                bytes=sum(entry.stat().st_blocks * 512 for entry in path.iterdir()),
                ranks=tuple(regions),
                owners={rank: owner for rank, owner in owners.items() if owner is not None},
            )
        )
    return found


def free(run_id: str, *, base: Path = SHARED_MEMORY) -> int:
    """Remove what a run has left in shared memory, and return its bytes.

    Raises CheckpointError when there is no such run, or a process still writes for it.
    """
    run = next((run for run in runs(base=base) if run.run_id == run_id), None)
    if run is None:
        raise CheckpointError(f"No run {run_id!r} holds shared memory in {_user_folder(base)}.")
    locks = [RankLock(run.path, rank) for rank in {*run.ranks, *_locked_ranks(run.path)}]
    try:
        for lock in locks:
            if not lock.try_acquire():
                raise CheckpointError(
                    f"Run {run_id} still writes: process {lock.owner()} holds {lock.path}. "
                    "Wait until it ends, or end it."
                )
        for entry in list(run.path.iterdir()):
            entry.unlink()
        run.path.rmdir()
    finally:
        for lock in locks:
            lock.release()
    return run.bytes


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for `folder`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def leave(folder: Path, rank: int) -> None:
    """Remove a rank's lock and, after the last one, the folder of a run that has ended well; what
    another process of the run still uses stays."""
    lock = RankLock(folder, rank)
    # Another rank may remove the folder meanwhile.
    with suppress(OSError):
        if lock.try_acquire():
            lock.path.unlink(missing_ok=True)
            for pattern in ("flush-*.json", "leave-*"):
                for left in folder.glob(pattern):
                    left.unlink(missing_ok=True)
            folder.rmdir()
    lock.release()


def _user_folder(base: Path) -> Path:
    return base / f"torchtitan_lite-{os.getuid()}"


def _require_private(path: Path) -> None:
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "no folder"
        raise CheckpointError(
            f"{path} is {kind}, of user {status.st_uid}, mode {mode:o}; needed is a folder of "
            f"user {os.getuid()}, mode 700. Remove it or mend its rights."
        )


def _locked_ranks(folder: Path) -> list[int]:
    names = [path.name for path in folder.glob("rank-*.lock")]
    return sorted(int(name[5:10]) for name in names if name[5:10].isdigit())
