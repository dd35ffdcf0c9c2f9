"""The kinds of faults: how each is injected into a rank, how it is undone, and the answer that it
must get. Parameters follow from the generator that is passed."""

import random
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import psutil

from tests.chaos.job_view import FaultNotApplicable
from tests.chaos.process_faults import exited_is_not_applicable
from tests.diagnosis.links import between_ranks, pacing
from tests.diagnosis.running_job import MESHES, RunningJob
from tests.diagnosis.scorer import Answer
from tests.diagnosis.slow_writer import disk_file
from torchtitan_lite.core.diagnosis import LIGHTHOUSE, NOTIFIER, RANK, WRITER, Cause

_ALLOWANCE_BYTES = 4 << 20
_ALL = tuple(MESHES)
_FOUR = tuple(name for name in MESHES if MESHES[name].ranks == 4)
_REPLICAS = tuple(name for name in MESHES if MESHES[name].replicas > 1)
_OWN_SAMPLES = ("FSDP-4", *_REPLICAS)
"""Meshes on which each rank has samples of its own."""


@dataclass(frozen=True)
class Target:
    """The rank that gets a fault."""

    job: RunningJob
    replica: int
    rank: int
    rng: random.Random

    @property
    def process(self) -> psutil.Process:
        return self.job.rank(self.replica, self.rank)

    def order(self, name: str, **values: object) -> None:
        self.job.order(self.replica, self.rank, name, **values)


Inject = Callable[[Target], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of faults."""

    name: str
    inject: Inject
    """Injects the fault at the start of the block, and undoes at its end what does not end with the
    process. Raises FaultNotApplicable."""
    causes: tuple[Cause, ...]
    meshes: tuple[str, ...] = _ALL
    process: str = RANK
    timeout_s: float = 40.0
    """Time for a diagnosis."""
    ends_replica: bool = False
    """Whether the replica of the rank is not started again, because its machine is at fault."""

    def answer(self, replica: int, rank: int, mesh: str) -> Answer:
        """Return the answer that a fault of a rank must get."""
        has_rank = self.process in (RANK, WRITER)
        return Answer(
            causes=self.causes,
            replica=replica if has_rank else None,
            rank=rank if has_rank else None,
            process=self.process,
            either_end=self.causes[0] is Cause.DEAD_LINK and MESHES[mesh].replicas > 1,
        )


@contextmanager
def _stopped(target: Target) -> Iterator[None]:
    process = target.process
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def _throttled(target: Target) -> Iterator[None]:
    """Give the rank a part of the processor time, as cgroups do."""
    share, process = target.rng.uniform(0.2, 0.5), target.process
    program = (
        "import os, signal, sys, time\n"
        f"while True:\n os.kill({process.pid}, signal.SIGSTOP); time.sleep({0.08 * (1 - share)})\n"
        f" os.kill({process.pid}, signal.SIGCONT); time.sleep({0.08 * share})\n"
    )
    throttle = subprocess.Popen(["python3", "-c", program], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        throttle.kill()
        throttle.wait()
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def _slow_layers(target: Target) -> Iterator[None]:
    target.order("slow_layers", seconds=target.job.step_time_s * target.rng.uniform(0.3, 1))
    yield
    target.order("slow_layers", seconds=0.0)


@contextmanager
def _lagging_loader(target: Target) -> Iterator[None]:
    # Prefetching hides what takes less than a step.
    target.order("lagging_loader", seconds=target.job.step_time_s * target.rng.uniform(2, 3))
    yield
    target.order("lagging_loader", seconds=0.0)


@contextmanager
def _slow_disk(target: Target) -> Iterator[None]:
    path = disk_file(target.job.orders, target.replica, target.rank)
    path.write_text(str(target.rng.uniform(0.3, 1.0)))
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def _slow_link(target: Target) -> Iterator[None]:
    with pacing(target.job.ranks(), (target.replica, target.rank), target.rng.uniform(1.5e5, 3e5)):
        yield


@contextmanager
def _dead_link(target: Target) -> Iterator[None]:
    """Drop all packets between this rank and others, as a broken cable does."""
    links = between_ranks(target.job.ranks(), (target.replica, target.rank))
    if not links:
        raise FaultNotApplicable("the rank has no connection to another rank")
    table = f"diagnosis_{target.process.pid}"
    rules = [
        f"add table inet {table}",
        f"add chain inet {table} received {{ type filter hook input priority 0; }}",
        *(
            f"add rule inet {table} received tcp sport {sport} tcp dport {dport} drop"
            for near, far in links
            for sport, dport in ((near, far), (far, near))
        ),
    ]
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules), text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", table], check=True)


def _ordered(name: str, **draw: Callable[[random.Random], object]) -> Inject:
    """Return the injector of a fault that the rank itself makes, and that ends with it."""

    @contextmanager
    def inject(target: Target) -> Iterator[None]:
        target.order(name, **{key: of(target.rng) for key, of in draw.items()})
        yield

    return inject


@contextmanager
def _clock_jump(target: Target) -> Iterator[None]:
    seconds = target.rng.choice([-1, 1]) * target.rng.choice([5, 60, 3600])
    target.job.shift_clock(target.process, seconds)
    yield


@contextmanager
def _flipped_gradient(target: Target) -> Iterator[None]:
    # In the sum over replicas a shard has lost its origin.
    is_single = target.job.mesh.replicas == 1
    where = target.rng.choice(["activation", "shard"]) if is_single else "activation"
    target.order("flip_gradient", where=where)
    yield


def _limited(number: int, limit: Callable[[psutil.Process], int], *, of_writer: bool) -> Inject:
    """Return the injector of a limit of a resource of a rank, or of its checkpoint writer."""

    @contextmanager
    def inject(target: Target) -> Iterator[None]:
        process = target.process
        if of_writer:
            process = target.job.writer(target.replica, target.rank)
        with exited_is_not_applicable():
            soft, hard = resource.prlimit(process.pid, number)
            resource.prlimit(process.pid, number, (limit(process), hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, number, (soft, hard))

    return inject


def _killed(find: Callable[[Target], psutil.Process]) -> Inject:
    @contextmanager
    def inject(target: Target) -> Iterator[None]:
        with exited_is_not_applicable():
            find(target).send_signal(signal.SIGKILL)
        yield

    return inject


def _place(rng: random.Random) -> float:
    return rng.random()


_WRITER_DIES = _killed(lambda target: target.job.writer(target.replica, target.rank))
KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="stopped rank", inject=_stopped, causes=(Cause.STOPPED,)),
        Kind(name="throttled rank", inject=_throttled, causes=(Cause.SLOW_RANK,), timeout_s=60),
        Kind(name="slow rank", inject=_slow_layers, causes=(Cause.SLOW_RANK,), timeout_s=60),
        Kind(
            name="lagging data loader",
            inject=_lagging_loader,
            causes=(Cause.SLOW_DATA,),
            timeout_s=80,
        ),
        Kind(
            name="slow disk",
            inject=_slow_disk,
            causes=(Cause.SLOW_STORAGE,),
            process=WRITER,
            timeout_s=60,
        ),
        Kind(name="slow link", inject=_slow_link, causes=(Cause.SLOW_LINK,)),
        Kind(name="dead link", inject=_dead_link, causes=(Cause.DEAD_LINK,)),
        Kind(
            name="skipped collective",
            inject=_ordered("skip_collective"),
            causes=(Cause.COLLECTIVE_MISMATCH,),
            meshes=_FOUR,
        ),
        Kind(
            name="repeated collective",
            inject=_ordered("repeat_collective"),
            causes=(Cause.COLLECTIVE_MISMATCH,),
            meshes=_FOUR,
        ),
        Kind(
            name="other collective",
            inject=_ordered("other_collective"),
            causes=(Cause.COLLECTIVE_MISMATCH,),
            meshes=_FOUR,
        ),
        Kind(
            name="wrong shape",
            inject=_ordered("wrong_shape", values=lambda rng: rng.choice([4, 7, 9, 64, 4096])),
            causes=(Cause.SHAPE_MISMATCH,),
            meshes=_FOUR,
        ),
        Kind(
            name="bit flip in weights",
            inject=_ordered("flip_weight", place=_place, bit=lambda rng: rng.randrange(32)),
            causes=(Cause.MEMORY_CORRUPTION,),
            ends_replica=True,
        ),
        Kind(
            name="bit flip in optimizer state",
            inject=_ordered(
                "flip_optimizer_state", place=_place, bit=lambda rng: rng.randrange(32)
            ),
            causes=(Cause.MEMORY_CORRUPTION,),
            ends_replica=True,
        ),
        Kind(
            name="bit flip in gradients",
            inject=_flipped_gradient,
            causes=(Cause.WRONG_COMPUTATION,),
            ends_replica=True,
            meshes=_OWN_SAMPLES,
        ),
        Kind(
            name="NaN in data",
            inject=_ordered("nan_in_data"),
            causes=(Cause.NON_FINITE,),
            meshes=_OWN_SAMPLES,
        ),
        Kind(
            name="full disk",
            inject=_limited(resource.RLIMIT_FSIZE, lambda process: 0, of_writer=True),
            causes=(Cause.STORAGE_FULL,),
            process=WRITER,
        ),
        Kind(
            name="memory limit",
            inject=_limited(
                resource.RLIMIT_AS,
                lambda process: process.memory_info().vms + _ALLOWANCE_BYTES,
                of_writer=False,
            ),
            causes=(Cause.OUT_OF_MEMORY,),
        ),
        Kind(
            name="exhausted memory",
            inject=_ordered("exhaust_memory"),
            causes=(Cause.OUT_OF_MEMORY,),
        ),
        Kind(
            name="file descriptors",
            inject=_limited(resource.RLIMIT_NOFILE, lambda process: 1, of_writer=False),
            causes=(Cause.OUT_OF_DESCRIPTORS,),
        ),
        Kind(
            name="checkpoint writer killed",
            inject=_WRITER_DIES,
            causes=(Cause.PROCESS_DIED,),
            process=WRITER,
        ),
        Kind(
            name="lighthouse killed",
            inject=_killed(lambda target: target.job.view.lighthouse()),
            causes=(Cause.PROCESS_DIED,),
            process=LIGHTHOUSE,
        ),
        Kind(
            name="departure notifier killed",
            inject=_killed(lambda target: target.job.view.departure_notifier()),
            causes=(Cause.PROCESS_DIED,),
            process=NOTIFIER,
        ),
        Kind(name="clock jump", inject=_clock_jump, causes=(Cause.CLOCK_JUMP,)),
    )
}
