"""Processes that die, stop, or run out of a resource."""

import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.chaos.job_view import FaultNotApplicable, FaultTarget
from torchtitan_lite.core.outputs import RECEIVES_STATE

_STARTUP_S = 60.0
_PAUSE_S = 1.5
_HANG_S = 120.0
_LAUNCHER_EXIT_S = 90.0
_ALLOWANCE_BYTES = 4 << 20


def rank_killed(target: FaultTarget) -> None:
    """Send SIGKILL, as the kernel does when memory runs out."""
    _send(_a_rank(target), signal.SIGKILL)


def rank_segfaults(target: FaultTarget) -> None:
    _send(_a_rank(target), signal.SIGSEGV)


def rank_aborts(target: FaultTarget) -> None:
    """Send SIGABRT, as after a failed CUDA or NCCL check."""
    _send(_a_rank(target), signal.SIGABRT)


def rank_gets_bus_error(target: FaultTarget) -> None:
    """Send SIGBUS, as when shared memory runs out."""
    _send(_a_rank(target), signal.SIGBUS)


def replica_killed(target: FaultTarget) -> None:
    """Kill a replica and its checkpoint writers, as when a machine is lost."""
    kill_all(target.job.replica_processes(target.replica))


def two_ranks_killed(target: FaultTarget) -> None:
    """Kill one rank in each of two replicas at almost the same time."""
    job = target.job
    other = (target.replica + 1) % job.num_replicas
    kill_all([*job.ranks(target.replica)[:1], *job.ranks(other)[:1]])


def all_replicas_killed(target: FaultTarget) -> None:
    """Kill all ranks: only snapshots in shared memory and checkpoints are left."""
    job = target.job
    kill_all(rank for replica in range(job.num_replicas) for rank in job.ranks(replica))


def launcher_paused(target: FaultTarget) -> None:
    """Stop the launcher for a while: the ranks go on."""
    _pause([target.job.launcher], _PAUSE_S)


def rank_killed_during_startup(target: FaultTarget) -> None:
    """Kill a rank, and kill its successor before it is ready."""
    before = {rank.pid for rank in target.job.ranks(target.replica)}
    rank_killed(target)
    successors = target.job.wait_until(
        lambda: [rank for rank in target.job.ranks(target.replica) if rank.pid not in before],
        "a new rank",
        _STARTUP_S,
    )
    time.sleep(target.rng.uniform(0, 3))
    _send(successors[0], signal.SIGKILL)


def healing_replica_killed(target: FaultTarget) -> None:
    """Kill a replica while it heals."""
    _wait_until_healing(target)
    kill_all(target.job.ranks(target.replica))


def donor_killed_during_healing(target: FaultTarget) -> None:
    """Kill the replica that sends the state; of two replicas, none is then up to date."""
    _wait_until_healing(target)
    donor = (target.replica + 1) % target.job.num_replicas
    kill_all(target.job.ranks(donor))


def lighthouse_killed(target: FaultTarget) -> None:
    _send(target.job.lighthouse(), signal.SIGKILL)


def lighthouse_paused(target: FaultTarget) -> None:
    _pause([target.job.lighthouse()], _PAUSE_S)


def lighthouse_and_rank_killed(target: FaultTarget) -> None:
    """Kill a rank together with the lighthouse that would notify the others of the death."""
    kill_all([target.job.lighthouse(), _a_rank(target)])


def departure_notifier_killed(target: FaultTarget) -> None:
    """Kill the departure notifier and a rank: the lighthouse must detect the death itself."""
    _send(target.job.departure_notifier(), signal.SIGKILL)
    rank_killed(target)


def rank_paused(target: FaultTarget) -> None:
    """Pause a rank, as when a virtual machine migrates."""
    _pause([_a_rank(target)], target.rng.uniform(0.2, _PAUSE_S))


def replica_paused(target: FaultTarget) -> None:
    """Pause a replica for longer than the heartbeat timeout."""
    _pause(target.job.replica_processes(target.replica), 7)


def rank_hangs(target: FaultTarget) -> None:
    """Stop a rank and its heartbeats until the launcher detects the hang and kills it."""
    rank = _a_rank(target)
    _send(rank, signal.SIGSTOP)
    try:
        psutil.wait_procs([rank], timeout=_HANG_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


def rank_slowed(target: FaultTarget) -> None:
    """Slow a rank to a third of its speed for some seconds, as on an overheated processor."""
    rank = _a_rank(target)
    for _ in range(30):
        _pause([rank], 0.06)
        time.sleep(0.03)


def writer_killed(target: FaultTarget) -> None:
    _send(_a_writer(target), signal.SIGKILL)


def writer_paused(target: FaultTarget) -> None:
    """Pause a checkpoint writer, which holds its snapshot for longer."""
    _pause([_a_writer(target)], _PAUSE_S)


def rank_out_of_memory(target: FaultTarget) -> None:
    """Limit a rank's address space to what it uses, then kill it."""
    rank = _a_rank(target)
    with exited_is_not_applicable():
        limit = rank.memory_info().vms + _ALLOWANCE_BYTES
        resource.prlimit(rank.pid, resource.RLIMIT_AS, (limit, limit))
    # A step reuses its memory, so that the limit alone may not end the rank.
    time.sleep(2)
    _send(rank, signal.SIGKILL)


def rank_out_of_descriptors(target: FaultTarget) -> None:
    """Prevent a rank from opening files and connections while the other replica dies."""
    rank = _a_rank(target)
    with exited_is_not_applicable():
        resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (1, 1))
    other = (target.replica + 1) % target.job.num_replicas
    kill_all(target.job.ranks(other))


def launcher_killed(target: FaultTarget) -> None:
    """Kill the launcher: all its descendants must exit too."""
    _end_launcher(target, signal.SIGKILL)


def launcher_terminated(target: FaultTarget) -> None:
    """Send SIGTERM, as a scheduler that preempts the job: all replicas save and leave."""
    _end_launcher(target, signal.SIGTERM)


FAULTS = (
    rank_killed,
    rank_segfaults,
    rank_aborts,
    rank_gets_bus_error,
    replica_killed,
    two_ranks_killed,
    all_replicas_killed,
    launcher_paused,
    rank_killed_during_startup,
    healing_replica_killed,
    donor_killed_during_healing,
    lighthouse_killed,
    lighthouse_paused,
    lighthouse_and_rank_killed,
    departure_notifier_killed,
    rank_paused,
    replica_paused,
    rank_slowed,
    rank_hangs,
    writer_killed,
    writer_paused,
    rank_out_of_memory,
    rank_out_of_descriptors,
)
LAUNCHER_FAULTS = (launcher_killed, launcher_terminated)
"""Faults after which the launcher must be restarted."""


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those of the processes that still exist."""
    for process in list(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _a_rank(target: FaultTarget) -> psutil.Process:
    ranks = sorted(target.job.ranks(target.replica), key=lambda rank: rank.pid)
    if not ranks:
        raise FaultNotApplicable("no rank is running")
    return target.rng.choice(ranks)


def _a_writer(target: FaultTarget) -> psutil.Process:
    writers = sorted(target.job.writers(target.replica), key=lambda writer: writer.pid)
    if not writers:
        raise FaultNotApplicable("no checkpoint writer is running")
    return target.rng.choice(writers)


def _wait_until_healing(target: FaultTarget) -> None:
    """Kill a rank and block until its replica heals."""
    job, replica = target.job, target.replica
    before = {rank.pid for rank in job.ranks(replica)}
    rank_killed(target)
    job.wait_until(
        lambda: (
            {rank.pid for rank in job.ranks(replica)} - before
            and RECEIVES_STATE in job.log(replica)
        ),
        "healing",
        _STARTUP_S,
    )


def _end_launcher(target: FaultTarget, number: signal.Signals) -> None:
    launcher = target.job.launcher
    _send(launcher, number)
    with suppress(psutil.NoSuchProcess):
        launcher.wait(timeout=_LAUNCHER_EXIT_S)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with exited_is_not_applicable():
        process.send_signal(number)


def _pause(processes: Iterable[psutil.Process], seconds: float) -> None:
    stopped = []
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        time.sleep(seconds)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def exited_is_not_applicable() -> Iterator[None]:
    """Raise FaultNotApplicable if the target process has exited in the meantime."""
    try:
        yield
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise FaultNotApplicable("the process has exited") from None
