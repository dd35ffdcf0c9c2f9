"""The folder of a run in shared memory, its rank locks, and cleanup of leftovers.

`/dev/shm/torchtitan_lite-UID/RUN_ID` holds `rank-R.snapshots` and `rank-R.lock` per rank,
`buddy-R.snapshots` and `buddy-R.lock` for the copies of a rank of another machine, and
`published-R.snapshots` and `published-R.lock` for the weights that a rank publishes, with
`published-R-S.lock` for the readers of each slot.
Invariants: only folders owned by this user and private to it are used; a lock file is removed only
by the holder of the rank's lock, and a lock on a removed file does not count.
"""

import fcntl
import os
import platform
import re
import stat
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchtitan_lite.core.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
OWN, COPY, PUBLISHED = "rank", "buddy", "published"
"""Kinds of regions: a rank's own snapshots, copies of those of a rank of another machine, and
published weights of a rank."""
_KINDS = (OWN, COPY, PUBLISHED)
_OF_RANK = re.compile(r"(rank|buddy|published)-([0-9]{5})\.(snapshots|lock)", re.ASCII)
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class SharedMemoryRun:
    """Shared memory that one run holds."""

    run_id: str
    path: Path
    bytes: int
    ranks: Mapping[str, tuple[int, ...]]
    """Kind of regions -> ranks that have one."""
    owners: Mapping[tuple[str, int], int]
    """(kind, rank) -> process that holds its lock now; 0 if unknown."""
    pinned: tuple[int, ...]
    """Ranks whose publisher has ended, and of which a subscriber still reads a version."""

    @property
    def is_used(self) -> bool:
        """Whether a process writes or reads it now."""
        return bool(self.owners or self.pinned)


def shared_memory_folder(run_id: str, *, base: Path = SHARED_MEMORY) -> Path:
    """Return the folder of a run, created if missing.

    Raises CheckpointError if `run_id` is not 32 hexadecimal digits, or if a folder on the path
    belongs to another user, is readable by others or is a link.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise CheckpointError(f"Run id {run_id!r} is not 32 digits of 0-9 and a-f.")
    return _private_folder(user_folder(base=base) / run_id)


def user_folder(*, base: Path = SHARED_MEMORY) -> Path:
    """Return the folder of this user's runs, created if missing. Raises CheckpointError as
    `shared_memory_folder` does."""
    return _private_folder(_user_folder(base))


def region_path(folder: Path, rank: int, kind: str = OWN) -> Path:
    """Return the path of a rank's snapshots in a run's folder."""
    return folder / f"{kind}-{rank:05d}.snapshots"


def region_files(folder: Path, kind: str = OWN) -> dict[int, Path]:
    """Return the snapshot files of a kind in a run's folder, by rank."""
    return _rank_files(folder, kind, "snapshots")


def existing_run_folder(run_id: str, *, base: Path = SHARED_MEMORY) -> Path | None:
    """Return the folder of a run in shared memory if it exists. Raises CheckpointError as
    `shared_memory_folder` does."""
    if not os.path.lexists(_user_folder(base) / run_id):
        return None
    return shared_memory_folder(run_id, base=base)


def remove_regions(
    run_id: str,
    *,
    keep: Container[int] = (),
    keep_copies: Container[int] = (),
    base: Path = SHARED_MEMORY,
) -> None:
    """Remove the unneeded snapshot files of all ranks except `keep`, the copies of those of all
    ranks except `keep_copies`, what ended publishers have left, and the folder if it is empty then.
    Safe to call concurrently. Raises CheckpointError as `shared_memory_folder` does."""
    folder = existing_run_folder(run_id, base=base)
    if folder is None:
        return
    for kind, kept in ((OWN, keep), (COPY, keep_copies)):
        for rank, path in region_files(folder, kind).items():
            if rank not in kept:
                path.unlink(missing_ok=True)
    remove_unpublished(folder)
    if not keep:
        # Writers that are still finishing hold locks in it.
        with suppress(OSError):
            folder.rmdir()


def list_runs(*, base: Path = SHARED_MEMORY) -> list[SharedMemoryRun]:
    """Return all runs of this user that hold shared memory, sorted by id."""
    folder = _user_folder(base)
    if not os.path.lexists(folder):
        return []
    _require_private(folder)
    runs = []
    for path in sorted(folder.iterdir()):
        if _RUN_ID.fullmatch(path.name) and path.is_dir():
            # A run that ends meanwhile removes its folder.
            with suppress(FileNotFoundError):
                runs.append(_read_run(path))
    return runs


def _read_run(path: Path) -> SharedMemoryRun:
    """Return what the folder of a run holds. Raises FileNotFoundError if it disappears."""
    owners = {
        (kind, rank): owner
        for kind in _KINDS
        for rank in _rank_files(path, kind, "lock")
        if (owner := RankLock(path, rank, kind).owner()) is not None
    }
    num_bytes = 0
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            num_bytes += entry.stat().st_blocks * 512
    return SharedMemoryRun(
        run_id=path.name,
        path=path,
        bytes=num_bytes,
        ranks={kind: tuple(region_files(path, kind)) for kind in _KINDS},
        owners=owners,
        # The locks of a live publisher are not tried, because it would skip a version.
        pinned=tuple(
            rank
            for rank in region_files(path, PUBLISHED)
            if (PUBLISHED, rank) not in owners and _is_pinned(path, rank)
        ),
    )


def free_run(run_id: str, *, base: Path = SHARED_MEMORY) -> int:
    """Free the shared memory that a run has left, and return its bytes.

    Raises CheckpointError if there is no such run, if a process still writes for it, or if a
    subscriber reads a version that it has published.
    """
    run = next((run for run in list_runs(base=base) if run.run_id == run_id), None)
    if run is None:
        raise CheckpointError(f"No run {run_id!r} holds shared memory in {_user_folder(base)}.")
    with ExitStack() as stack:
        for kind in _KINDS:
            for rank in sorted({*run.ranks[kind], *_rank_files(run.path, kind, "lock")}):
                lock = RankLock(run.path, rank, kind)
                if not lock.try_acquire():
                    raise CheckpointError(
                        f"Run {run_id} still writes: process {lock.owner()} holds {lock.path}. "
                        "Wait until it ends, or end it."
                    )
                stack.callback(lock.release)
        for path in run.path.glob(f"{PUBLISHED}-*-*.lock"):
            descriptor = try_flock(path, fcntl.LOCK_EX)
            if descriptor is None:
                raise CheckpointError(
                    f"Run {run_id} is in use: a subscriber holds {path}. Wait until it has "
                    "received the version, or end it."
                )
            stack.callback(release_flock, descriptor)
        for entry in list(run.path.iterdir()):
            entry.unlink()
        run.path.rmdir()
    return run.bytes


def slot_lock_path(folder: Path, rank: int, slot: int) -> Path:
    """Return the path of the lock of a slot of a rank's published versions."""
    return folder / f"{PUBLISHED}-{rank:05d}-{slot}.lock"


def unpublish(folder: Path, rank: int) -> None:
    """Remove the published versions of a rank with their locks. The caller must hold the rank's
    lock."""
    region_path(folder, rank, PUBLISHED).unlink(missing_ok=True)
    for path in _slot_locks(folder, rank):
        path.unlink(missing_ok=True)
    RankLock(folder, rank, PUBLISHED).path.unlink(missing_ok=True)


def remove_unpublished(folder: Path) -> None:
    """Remove what killed publishers have left in a run's folder: the regions whose lock is free.
    Safe to call concurrently."""
    regions, locked = (_rank_files(folder, PUBLISHED, suffix) for suffix in ("snapshots", "lock"))
    for rank in {*regions, *locked}:
        lock = RankLock(folder, rank, PUBLISHED)
        # Another process may remove the folder.
        with suppress(FileNotFoundError):
            if lock.try_acquire():
                unpublish(folder, rank)
        lock.release()


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def release_rank(folder: Path, rank: int) -> None:
    """Remove the lock of a rank of a completed run, those of ranks that the run had before it was
    resized, and, after the last one, its folder; files that another process of the run uses are
    kept."""
    lock = RankLock(folder, rank)
    # Another rank may remove the folder concurrently.
    with suppress(OSError):
        if lock.try_acquire():
            lock.path.unlink(missing_ok=True)
            for earlier in _rank_files(folder, OWN, "lock"):
                other = RankLock(folder, earlier)
                if other.try_acquire():
                    other.path.unlink(missing_ok=True)
                other.release()
            for pattern in ("flush-*.json", "leave-*", "last-*"):
                for left in folder.glob(pattern):
                    left.unlink(missing_ok=True)
            folder.rmdir()
    lock.release()


def machine_number() -> int:
    """Return a number below 2**63 that is equal for processes that see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    device = os.stat(SHARED_MEMORY).st_dev if SHARED_MEMORY.is_dir() else 0
    identity = f"{platform.node()}-{boot.read_text().strip() if boot.is_file() else ''}-{device}"
    return xxhash.xxh3_64_intdigest(identity.encode()) >> 1


def try_flock(path: Path, operation: int, *, create: bool = True) -> int | None:
    """Lock the file at `path` by flock's `operation` without waiting, and return its descriptor,
    which holds the lock until `release_flock`; None if another process holds it. Raises
    FileNotFoundError for a missing file unless `create`."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        # Its holder has removed the file after it was opened here.
        os.close(descriptor)


def release_flock(descriptor: int) -> None:
    """Release a lock of `try_flock`."""
    # A process that was forked meanwhile has the descriptor, too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class RankLock:
    """Lock of one rank in the run's folder; its holder may write the rank's part, the copy of its
    snapshots, or what it publishes.

    It is a flock, which the kernel releases when the holder ends for any reason.
    """

    def __init__(self, folder: Path, rank: int, kind: str = OWN) -> None:
        self.path = folder / f"{kind}-{rank:05d}.lock"
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free, and write this process's id into its file."""
        if self._descriptor is not None:
            return True
        descriptor = try_flock(self.path, fcntl.LOCK_EX)
        if descriptor is None:
            return False
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return True

    def acquire(self, timeout_s: float) -> bool:
        """Acquire the lock; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until the lock is free, without keeping it; False after `timeout_s`."""
        if not self.acquire(timeout_s):
            return False
        self.release()
        return True

    def owner(self) -> int | None:
        """Return the process that holds the lock; None if it is free."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0)
            return int(text) if text.isdigit() else 0
        else:
            return None
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            release_flock(self._descriptor)
            self._descriptor = None


def _user_folder(base: Path) -> Path:
    return base / f"torchtitan_lite-{os.getuid()}"


def _private_folder(path: Path) -> Path:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        _require_private(path)
    else:
        # The umask may have removed permissions.
        os.chmod(path, 0o700)
    return path


def _require_private(path: Path) -> None:
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "no folder"
        raise CheckpointError(
            f"{path} is {kind}, of user {status.st_uid}, mode {mode:o}; it must be a folder of "
            f"user {os.getuid()}, mode 700. Remove it, or fix its permissions."
        )


def _rank_files(folder: Path, kind: str, suffix: str) -> dict[int, Path]:
    """Return the files of a kind in a run's folder, by rank."""
    files: dict[int, Path] = {}
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        # Another process has removed the folder with its contents.
        return files
    for name in names:
        match = _OF_RANK.fullmatch(name)
        if match and (match[1], match[3]) == (kind, suffix):
            files[int(match[2])] = folder / name
    return dict(sorted(files.items()))


def _slot_locks(folder: Path, rank: int) -> list[Path]:
    return list(folder.glob(f"{PUBLISHED}-{rank:05d}-*.lock"))


def _is_pinned(folder: Path, rank: int) -> bool:
    """Return whether a subscriber reads a version of a rank whose publisher has ended."""
    for path in _slot_locks(folder, rank):
        descriptor = try_flock(path, fcntl.LOCK_EX)
        if descriptor is None:
            return True
        release_flock(descriptor)
    return False
