"""Processes that die, stand still, or are starved. Layer: above kind."""

import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from torchtitan_lite.chaos.kind import Kind, Target, kinds_of
from torchtitan_lite.chaos.scene import Missed
from torchtitan_lite.outputs import RECEIVES_STATE

_BOOT_S = 60.0
_PAUSE_S = 1.5
_HANG_S = 120.0
_ALLOWANCE_BYTES = 4 << 20


def rank_killed(target: Target) -> None:
    """SIGKILL, as the kernel does when memory runs out."""
    _send(_a_rank(target), signal.SIGKILL)


def rank_segfaults(target: Target) -> None:
    _send(_a_rank(target), signal.SIGSEGV)


def rank_aborts(target: Target) -> None:
    """As where a CUDA or NCCL check fails."""
    _send(_a_rank(target), signal.SIGABRT)


def rank_gets_bus_error(target: Target) -> None:
    """As where shared memory has run out."""
    _send(_a_rank(target), signal.SIGBUS)


def replica_killed(target: Target) -> None:
    """As a machine that is lost: its writers go too."""
    _kill_all(processes_of_replica(target))


def two_ranks_killed(target: Target) -> None:
    """Of two replicas, as near to each other in time as can be."""
    scene = target.scene
    other = (target.replica + 1) % scene.num_replicas
    victims = [*scene.ranks(target.replica)[:1], *scene.ranks(other)[:1]]
    _kill_all(victims)


def all_replicas_killed(target: Target) -> None:
    """What is left are snapshots in shared memory and checkpoints."""
    scene = target.scene
    _kill_all(rank for replica in range(scene.num_replicas) for rank in scene.ranks(replica))


def torchrun_killed(target: Target) -> None:
    _send(target.scene.torchrun(target.replica), signal.SIGKILL)


def torchrun_stopped(target: Target) -> None:
    _pause([target.scene.torchrun(target.replica)], _PAUSE_S)


def rank_killed_while_it_starts(target: Target) -> None:
    """Dies, and again before it has come up."""
    before = {rank.pid for rank in target.scene.ranks(target.replica)}
    rank_killed(target)
    again = target.scene.wait_until(
        lambda: [one for one in target.scene.ranks(target.replica) if one.pid not in before],
        "a new rank",
        _BOOT_S,
    )
    time.sleep(target.draw.uniform(0, 3))
    _send(again[0], signal.SIGKILL)


def killed_while_it_receives_the_state(target: Target) -> None:
    """The newcomer dies in the middle of a heal."""
    _until_it_heals(target)
    _kill_all(target.scene.ranks(target.replica))


def donor_killed_while_it_gives_the_state(target: Target) -> None:
    """And with two replicas, nobody is left who is whole."""
    _until_it_heals(target)
    donor = (target.replica + 1) % target.scene.num_replicas
    _kill_all(target.scene.ranks(donor))


def lighthouse_killed(target: Target) -> None:
    _send(target.scene.lighthouse(), signal.SIGKILL)


def lighthouse_stopped(target: Target) -> None:
    _pause([target.scene.lighthouse()], _PAUSE_S)


def lighthouse_and_rank_killed(target: Target) -> None:
    """Who could tell the others of the death is gone too."""
    victims = [target.scene.lighthouse(), _a_rank(target)]
    _kill_all(victims)


def messenger_killed(target: Target) -> None:
    """The lighthouse has to find out about deaths by itself."""
    _send(target.scene.messenger(), signal.SIGKILL)
    rank_killed(target)


def rank_paused(target: Target) -> None:
    """As a virtual machine that is moved."""
    _pause([_a_rank(target)], target.draw.uniform(0.2, _PAUSE_S))


def replica_paused(target: Target) -> None:
    """Longer than a heartbeat may take."""
    _pause(processes_of_replica(target), 7)


def rank_stopped_for_good(target: Target) -> None:
    """It hangs, and its heartbeats with it: the launcher has to see that, and to end it."""
    rank = _a_rank(target)
    _send(rank, signal.SIGSTOP)
    try:
        psutil.wait_procs([rank], timeout=_HANG_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


def rank_slowed(target: Target) -> None:
    """It runs a third of the time for some seconds, as on a processor that is too hot."""
    rank = _a_rank(target)
    for _ in range(30):
        _pause([rank], 0.06)
        time.sleep(0.03)


def writer_killed(target: Target) -> None:
    _send(_a_writer(target), signal.SIGKILL)


def writer_paused(target: Target) -> None:
    """It holds its snapshot for long."""
    _pause([_a_writer(target)], _PAUSE_S)


def rank_out_of_memory(target: Target) -> None:
    """No further page is given to it."""
    rank = _a_rank(target)
    with _gone_is_missed():
        limit = rank.memory_info().vms + _ALLOWANCE_BYTES
        resource.prlimit(rank.pid, resource.RLIMIT_AS, (limit, limit))
    # It may not need any: a step reuses its memory.
    time.sleep(2)
    _send(rank, signal.SIGKILL)


def rank_out_of_descriptors(target: Target) -> None:
    """It opens no file and no connection any more, while the other replica dies."""
    rank = _a_rank(target)
    with _gone_is_missed():
        resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (1, 1))
    other = (target.replica + 1) % target.scene.num_replicas
    _kill_all(target.scene.ranks(other))


def launcher_killed(target: Target) -> None:
    """Everything that it has started must go with it."""
    _end_launcher(target, signal.SIGKILL)


def launcher_asked_to_leave(target: Target) -> None:
    """As by a scheduler that preempts the job: all save and leave."""
    _end_launcher(target, signal.SIGTERM)


KINDS: dict[str, Kind] = {
    **kinds_of(
        rank_killed,
        rank_segfaults,
        rank_aborts,
        rank_gets_bus_error,
        replica_killed,
        two_ranks_killed,
        all_replicas_killed,
        torchrun_killed,
        torchrun_stopped,
        rank_killed_while_it_starts,
        killed_while_it_receives_the_state,
        donor_killed_while_it_gives_the_state,
        lighthouse_killed,
        lighthouse_stopped,
        lighthouse_and_rank_killed,
        messenger_killed,
        rank_paused,
        replica_paused,
        rank_slowed,
        rank_stopped_for_good,
        writer_killed,
        writer_paused,
        rank_out_of_memory,
        rank_out_of_descriptors,
    ),
    **{
        one.__name__: Kind(name=one.__name__, strike=one, restarts_launcher=True)
        for one in (launcher_killed, launcher_asked_to_leave)
    },
}


def _a_rank(target: Target) -> psutil.Process:
    ranks = sorted(target.scene.ranks(target.replica), key=lambda rank: rank.pid)
    if not ranks:
        raise Missed("no rank is there")
    return target.draw.choice(ranks)


def _a_writer(target: Target) -> psutil.Process:
    writers = sorted(target.scene.writers(target.replica), key=lambda writer: writer.pid)
    if not writers:
        raise Missed("no writer is there")
    return target.draw.choice(writers)


def processes_of_replica(target: Target) -> list[psutil.Process]:
    """All processes of a replica."""
    torchrun = target.scene.torchrun(target.replica)
    with _gone_is_missed():
        below = torchrun.children(recursive=True)
    return [torchrun, *below]


def _until_it_heals(target: Target) -> None:
    scene, replica = target.scene, target.replica
    before = {rank.pid for rank in scene.ranks(replica)}
    rank_killed(target)
    scene.wait_until(
        lambda: (
            {rank.pid for rank in scene.ranks(replica)} - before
            and RECEIVES_STATE in scene.log(replica)
        ),
        "a heal",
        _BOOT_S,
    )


def _end_launcher(target: Target, number: signal.Signals) -> None:
    launcher = target.scene.launcher
    _send(launcher, number)
    with suppress(psutil.NoSuchProcess):
        launcher.wait(timeout=90)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with _gone_is_missed():
        process.send_signal(number)


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in list(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
def _gone_is_missed() -> Iterator[None]:
    """A process that has ended by itself meanwhile cannot be struck any more."""
    try:
        yield
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise Missed("the process has gone") from None
