"""The lease of a run's folder: one run at a time writes there.

Its holder is the leader's process. The folder is free once that process has ended, which others on
its machine see at once, and those on other machines when the lease is not renewed any more. The
restarts of one run have the same *instance*, and take the lease over from each other. A process
whose lease another run has taken stops; what it has not committed by then does not count.
"""

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_lite.core.errors import TRANSIENT, ConfigError, UserError
from torchtitan_lite.core.lease_file import (
    LeaseFile,
    Sight,
    lease_files,
    open_lease_file,
    wait_for_change,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.outputs import replica_folder
from torchtitan_lite.core.rank.processes import start_ticks
from torchtitan_lite.core.urls import local_path, split

_NAME = "lease.json"
_SUPERVISOR = "TORCHTITAN_LITE_SUPERVISOR"
"""Environment variable: process id of the supervisor of a run, and the instance of the run that it
restarts."""
_INSTANCE = "TORCHTITAN_LITE_INSTANCE"
"""Environment variable: the instance of the run in which this process has taken part."""
_RETRY_S = 2.0
_TRIES, _TRY_AGAIN_S = 3, 0.2
_SETTLE_S = 1.0
"""After a takeover without a lock, time in which another process that has seen the same lost holder
may still write."""


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """The process that holds a lease."""

    instance: str
    token: str
    """Unique to each time that a lease is taken."""
    folder: str
    """The run's folder, as an absolute path."""
    host: str
    machine: str
    """Equal for processes that see each other's ids: boot of the kernel, and PID namespace."""
    pid: int
    stop_pid: int
    """The process to signal so that the run stops: its supervisor, if it has one."""
    started_ticks: int
    """Start of the process after the boot, by which a reused id is noticed."""
    since_s: float
    """When it took the lease (Unix time)."""

    def lives(self) -> bool:
        """Whether the process runs, which must be of this machine."""
        ticks = start_ticks(self.pid)
        return ticks == self.started_ticks or (ticks is None and _is_hidden(self.pid))


class FolderInUse(UserError):
    """Another run writes into the folder."""

    exit_status = TRANSIENT

    def __init__(self, message: str, holder: LeaseHolder | None = None) -> None:
        """`holder`: the process that uses it, if known."""
        super().__init__(message)
        self.holder = holder


@dataclass(frozen=True, kw_only=True)
class LeasePlaces:
    """Locations of the leases of a run."""

    folder: Path
    """The run's folder."""
    held: tuple[LeaseFile, ...]
    """The leases that it takes."""
    other: Callable[[], Sequence[LeaseFile]]
    """Those that must be free: of a run without replicas for a replica, and the reverse. Raises
    OSError."""
    missing: str = ""
    """Location without a lease, because fsspec does not know its storage."""


def lease_places(dump_folder: Path, checkpoint_root: str, replica: int | None) -> LeasePlaces:
    """Return the places of a run. That of a replica is in its own folder; the checkpoints, which
    another run may name from its own folder, have a lease of their own. `checkpoint_root` is empty
    without checkpoints."""
    own = dump_folder if replica is None else replica_folder(dump_folder, replica)
    held, missing = [open_lease_file(str(own), _NAME)], ""
    path = local_path(checkpoint_root) if checkpoint_root else None
    root = checkpoint_root if path is None else str(path)
    if root:
        name = _NAME if replica is None else f"replica_{replica:03d}.{_NAME}"
        try:
            held.append(open_lease_file(root, name))
        except ConfigError:
            root, missing = "", root

    def other() -> Sequence[LeaseFile]:
        if replica is not None:
            return [open_lease_file(folder, _NAME) for folder in (str(dump_folder), root) if folder]
        leases = lease_files(str(dump_folder), f"replica_*/{_NAME}")
        return leases + (lease_files(root, f"replica_*.{_NAME}") if root else [])

    return LeasePlaces(folder=dump_folder, held=tuple(held), other=other, missing=missing)


def supervisor_environment() -> dict[str, str]:
    """Return the environment variable of processes that this one starts, so that they take over
    each other's lease, as those of one run: that of the supervisor above, if there is one."""
    return {_SUPERVISOR: os.environ.get(_SUPERVISOR) or f"{os.getpid()} {new_instance()}"}


def joined_instance() -> str:
    """Return the instance of the run in which this process has taken part; empty if there is
    none."""
    return os.environ.get(_INSTANCE, "")


def supervised_instance(environment: Mapping[str, str] | None = None) -> str:
    """Return the instance of the run that a supervisor restarts; empty if there is none.
    `environment`: that of its processes, if it is not that of this one."""
    return _supervisor(environment)[1]


def join_instance(instance: str) -> None:
    """Record the instance of the run in which this process takes part."""
    os.environ[_INSTANCE] = instance


def new_instance() -> str:
    """Return the instance of another run."""
    return secrets.token_hex(8)


def wait_until_free(
    places: LeasePlaces,
    *,
    waits: bool,
    tick: Callable[[], None] = lambda: None,
    instance: str | None = None,
) -> None:
    """Return once the folders are free, or held by `instance`, that of this process if omitted.
    Raises FolderInUse unless `waits`. `tick` is called between two looks, and may raise."""
    if instance is None:
        instance = joined_instance() or supervised_instance()
    is_announced = False
    while (occupied := _first_occupant(places, instance)) is not None:
        if not waits:
            raise occupied
        if not is_announced:
            is_announced = True
            logger.info("Waiting: %s", occupied)
        tick()
        time.sleep(_RETRY_S)


class RunLease:
    """The leases of one run, renewed in the background while they are held."""

    def __init__(
        self, places: LeasePlaces, instance: str, *, on_loss: Callable[[str], None]
    ) -> None:
        """`on_loss` is called with the reason, by a thread, if another run takes one over."""
        self._places, self._on_loss = places, on_loss
        self._holder = LeaseHolder(
            instance=instance,
            token=secrets.token_hex(8),
            folder=str(places.folder.resolve()),
            host=platform.node(),
            machine=this_machine(),
            pid=os.getpid(),
            stop_pid=_supervisor()[0],
            started_ticks=start_ticks(os.getpid()) or 0,
            since_s=time.time(),
        )
        self._content = json.dumps(asdict(self._holder)).encode()
        self._held: list[_HeldLease] = []

    @property
    def places(self) -> tuple[str, ...]:
        """The leases that are held, as paths or URLs."""
        return tuple(held.file.where for held in self._held)

    def acquire(
        self, *, waits: bool, renews: bool = True, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Take the leases, and renew them if `renews`. If `waits`, block until they are free, else
        raise FolderInUse; none is held then. `tick` is called while it blocks, and may raise to end
        that. If a storage cannot be written, the run continues without the lease there, because a
        run must not end for lack of it."""
        if self._places.missing:
            _warn(self._places.missing, "is of a storage without leases")
        while True:
            wait_until_free(self._places, waits=waits, tick=tick, instance=self._holder.instance)
            try:
                taken = self._take_all()
            except FolderInUse:
                # Another run was faster.
                continue
            self._held = [_HeldLease(file, self._holder, self._content) for file in taken]
            for held in self._held if renews else ():
                held.start(self._on_loss)
            return

    def release(self) -> None:
        """Give the leases back."""
        for held in self._held:
            held.release()
        self._held = []

    def _take_all(self) -> list[LeaseFile]:
        taken: list[LeaseFile] = []
        try:
            for file in self._places.held:
                if self._take_if_possible(file):
                    taken.append(file)
            # After the own lease exists: of two that start at once, at least one sees the other.
            with suppress(OSError):
                for file in self._places.other():
                    self._require_free(file)
        except FolderInUse:
            for file in taken:
                _remove(file, self._content)
            raise
        return taken

    def _take_if_possible(self, file: LeaseFile) -> bool:
        """Take a lease; False, with a warning, if its storage fails. Raises FolderInUse."""
        problem: OSError | None = None
        for _ in range(_TRIES):
            try:
                while not self._take(file):
                    continue
            except OSError as error:
                problem = error
                time.sleep(_TRY_AGAIN_S)
            else:
                return True
        _warn(file.where, f"cannot be written: {problem}")
        return False

    def _take(self, file: LeaseFile) -> bool:
        """Take a lease; False if another process was faster. Raises FolderInUse and OSError."""
        lost = self._require_free(file)
        with file.excluding() as is_locked:
            now = file.look()
            if now is None:
                return file.create(self._content)
            if lost is None or now.content != lost.content:
                return False
            file.replace(self._content)
        holder = _parse(lost)
        if not is_locked or (holder is not None and holder.machine != self._holder.machine):
            time.sleep(_SETTLE_S)
        now = file.look()
        return now is not None and now.content == self._content

    def _require_free(self, file: LeaseFile) -> Sight | None:
        """Return the content of a lease whose holder does not use it any more; None if there is no
        lease. Raises FolderInUse and OSError."""
        sight = file.look()
        holder = occupant(file, sight, self._holder.instance)
        if holder is not None:
            raise _in_use(file, holder)
        return sight


class _HeldLease:
    """A lease that is held, and renewed by a thread of its own: a storage that hangs must not keep
    the others from being renewed."""

    def __init__(self, file: LeaseFile, holder: LeaseHolder, content: bytes) -> None:
        self.file, self._holder, self._content = file, holder, content
        self._is_released = threading.Event()
        self._renewing = threading.Lock()

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Start to renew it."""
        threading.Thread(target=self._renew, args=(on_loss,), name="run lease", daemon=True).start()

    def release(self) -> None:
        """Give it back."""
        self._is_released.set()
        # A renewal would write a removed lease again. That of a storage which hangs is not waited
        # for.
        is_locked = self._renewing.acquire(timeout=_RETRY_S)
        try:
            _remove(self.file, self._content)
        finally:
            if is_locked:
                self._renewing.release()

    def _renew(self, on_loss: Callable[[str], None]) -> None:
        file = self.file
        while not self._is_released.wait(file.renew_s):
            # While a storage does not answer, no process takes over the lease there.
            with self._renewing, suppress(OSError):
                if self._is_released.is_set():
                    return
                sight = file.look()
                if sight is None:
                    file.create(self._content)
                elif sight.content == self._content:
                    file.renew(self._content)
                else:
                    holder = _parse(sight)
                    if holder is None or holder.instance != self._holder.instance:
                        on_loss(_taken_over(file, holder))
                    return


def occupant(file: LeaseFile, sight: Sight | None, instance: str) -> LeaseHolder | None:
    """Return the holder of the lease that was seen; None if it is free or held by `instance`.
    Blocks until a holder on another machine has renewed it, or counts as lost. Raises OSError."""
    while sight is not None:
        holder = _parse(sight)
        if holder is not None and holder.instance == instance:
            return None
        if holder is not None and holder.machine == this_machine():
            return holder if holder.lives() else None
        later = wait_for_change(file, sight)
        if later is sight:
            return None
        if later is not None and later.content == sight.content:
            return holder
        sight = later
    return None


def taken_over(places: Sequence[str]) -> str:
    """Return that another machine holds one of the leases, given as paths or URLs, which this run
    has held; empty if none does. Whoever takes a run over on this machine waits for the writers of
    the former process, whose saves count. If the storage does not answer, the lease counts as
    held."""
    for place in places:
        file = open_lease_file(*split(place))
        with suppress(OSError):
            sight = file.look()
            holder = None if sight is None else _parse(sight)
            if holder is not None and holder.machine != this_machine():
                return _taken_over(file, holder)
    return ""


def this_machine() -> str:
    """Return an identity that is equal for processes that see each other's ids."""
    boot, namespace = platform.node(), 0
    # Sandboxes may hide them.
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot} {namespace}"


def _is_hidden(pid: int) -> bool:
    """Return whether a process of another user runs that /proc does not show (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _supervisor(environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the process to signal so that this run stops, and the instance of the run that it
    restarts; without a supervisor this process, and an empty one."""
    pid, _, instance = (environment or os.environ).get(_SUPERVISOR, "").partition(" ")
    return (int(pid), instance) if pid.isdecimal() else (os.getpid(), "")


def _first_occupant(places: LeasePlaces, instance: str) -> FolderInUse | None:
    """Return the error for the first lease that another run holds. A storage that does not answer
    does not count."""
    for file in places.held:
        with suppress(OSError):
            holder = occupant(file, file.look(), instance)
            if holder is not None:
                return _in_use(file, holder)
    with suppress(OSError):
        for file in places.other():
            holder = occupant(file, file.look(), instance)
            if holder is not None:
                return _in_use(file, holder)
    return None


def _remove(file: LeaseFile, content: bytes) -> None:
    """Remove a lease with this content."""
    with suppress(OSError):
        sight = file.look()
        if sight is not None and sight.content == content:
            file.remove()


def _warn(where: str, why: str) -> None:
    logger.warning("A second run in the same place is not noticed: %s %s", where, why)


def _parse(sight: Sight) -> LeaseHolder | None:
    """Return the holder; None if the content is not that of a lease."""
    try:
        holder = LeaseHolder(**json.loads(sight.content))
        if type(holder.pid) is not int or not isinstance(holder.since_s, float):
            return None
    except (TypeError, ValueError):
        return None
    return holder


def _in_use(file: LeaseFile, holder: LeaseHolder) -> FolderInUse:
    """Return the error that names the user of a folder and the remedy."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_s))
    return FolderInUse(
        f"{file.where.rpartition('/')[0]} is in use by process {holder.stop_pid} on {holder.host} "
        f"since {since}, {file.last_sign()}. Stop that run (kill -INT {holder.stop_pid} there), "
        'set job.dump_folder to another folder, or job.when_in_use to "wait".',
        holder,
    )


def _taken_over(file: LeaseFile, holder: LeaseHolder | None) -> str:
    who = "another run" if holder is None else f"process {holder.stop_pid} on {holder.host}"
    return f"{file.where} was taken over by {who}: this run stops writing."
