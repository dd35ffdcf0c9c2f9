"""Replicas that die and return: who takes part in each step, and a state for who was away.

A step, as one replica sees it: a quorum of those who are there is found while the last step is
logged and its snapshot taken; who is behind receives the state of one who is not; the samples are
divided over all; gradients are added up; all ranks of a replica say whether the sums hold.

Progress is the place in the order of samples, which moves on with every settled step. It is what
torchft calls the step, so that a step that was refused for its numbers counts as one that all
replicas have come through.

Layer: above torchft_manager, gradient_sums, healing and guard.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from torchtitan_lite.checkpoint.background.coworkers import Coworkers
from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.outputs import RECEIVES_STATE, TAKES_PART
from torchtitan_lite.phases import Phase, Phases
from torchtitan_lite.replica.gradient_sums import GradientSums
from torchtitan_lite.replica.guard import Floor
from torchtitan_lite.replica.healing import HealingTransport, Source
from torchtitan_lite.replica.healing.client import Link, Misfit, receive
from torchtitan_lite.replica.healing.live_state import Run
from torchtitan_lite.replica.participation import LeaveRequested, News, Share
from torchtitan_lite.replica.torchft_manager import QuorumManager, same_device_in_thread
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

_MOST_FAILURES = 20
"""Of steps in a row, those aside in which others came or went."""
_MOST_HEALS = 5
"""Attempts in a row at receiving the state."""
_LOOK_S = 0.5
_PATIENCE_S = 5.0
"""After which who waits for others heeds a wish that it leave, and looks once more whether it is of
use to them."""


class FaultTolerantReplicas:
    """This replica among the others. See `participation.Replicas`."""

    def __init__(
        self,
        config: FaultToleranceConfig,
        run: Run,
        mesh: Mesh,
        *,
        manager: QuorumManager,
        transport: HealingTransport,
        floor: Floor,
        link: Callable[[str], Link],
        newest_stored: Callable[[], int],
        before_change: Callable[[], None],
        say_goodbye: Callable[[str], None],
        leaves: Callable[[], bool],
        stored_before: int,
        phases: Phases,
    ) -> None:
        """`link` tells how a peer's URL is reached, `newest_stored` the newest step of the run that
        is stored, as the leader sees it, and `before_change` comes back when the state may change.
        `say_goodbye` tells the lighthouse that the replica of this id leaves; `leaves` is whether
        this process was asked to. `stored_before` is the newest step that was stored when this
        replica looked for what to start from. Use `join`."""
        self._config, self._run, self._mesh = config, run, mesh
        self._manager, self._transport, self._floor = manager, transport, floor
        self._link, self._newest_stored = link, newest_stored
        self._before_change, self._say_goodbye = before_change, say_goodbye
        self._has_left = False
        self._leaves, self._stored_before = leaves, stored_before
        self._phases = phases
        self._sums = GradientSums(manager, config.bucket_mib << 20)
        self._starter = ThreadPoolExecutor(1, "quorum", initializer=same_device_in_thread())
        self._started: Future[None] | None = None
        self._is_whole = True
        self._is_taken_back = False
        """Since the last quorum."""
        self._quorum_id: int | None = None
        self._failures = 0
        self._heals = 0
        self._is_first_step = False
        """Of this quorum."""
        self._news: list[News] = []

    def begin(self) -> None:
        self._ask()

    def _ask(self) -> None:
        """Begin to look for who is there."""
        self._manager.set_progress(self._progress)
        self._started = self._starter.submit(self._manager.start_quorum)

    def agree(self) -> Share:
        started_s, is_told = time.monotonic(), False
        while True:
            if self._started is None:
                self._ask()
            assert self._started is not None
            asked, self._started = self._started, None
            if not self._found(asked, started_s):
                continue
            count, fewest = self._manager.num_participants(), self._config.min_replica_size
            if count < fewest:
                if not is_told:
                    logger.warning("Replicas that are there: %d of at least %d.", count, fewest)
                is_told = True
                self._check_patience(started_s, "too few replicas are there")
                time.sleep(_LOOK_S)
                continue
            if self._joined():
                return self._share()

    def _found(self, asked: Future[None], since_s: float) -> bool:
        """Whether there is a quorum. While too few are there, or the lighthouse is gone, the call
        goes on; where it fails, it does so on all ranks, and all ask again."""
        looks_at_s = time.monotonic() + _PATIENCE_S
        while not wait([asked], _LOOK_S).done:
            self._check_patience(since_s, "nobody answers")
            if time.monotonic() >= looks_at_s:
                looks_at_s += _PATIENCE_S
                self._wait_on(f"asked {time.monotonic() - since_s:.0f} s ago")
        try:
            asked.result()
            return True
        except ReplicaError:
            raise
        except Exception as caught:
            error = str(caught)
        self._manager.forget_failed_quorum()
        self._check_patience(since_s, error)
        self._wait_on(f"asking again: {error}")
        return False

    def _wait_on(self, why: str) -> None:
        """Say that there is no quorum yet. Raises ReplicaError on the leader where this replica is
        of no use any more."""
        if self._mesh.is_leader:
            self._refuse_what_is_behind(self._newest_stored())
        logger.warning("No quorum yet, %s.", why)

    def _check_patience(self, since_s: float, reason: str) -> None:
        """Raises LeaveRequested or ReplicaError when it is not waited on."""
        waited_s = time.monotonic() - since_s
        if waited_s >= _PATIENCE_S and self._leaves():
            raise LeaveRequested
        if waited_s >= self._config.quorum_timeout_s:
            raise ReplicaError(
                f"No quorum of {self._config.min_replica_size} replicas or more was found in "
                f"fault_tolerance.quorum_timeout_s = {self._config.quorum_timeout_s:g} seconds: "
                f"{reason}"
            )

    def _joined(self) -> bool:
        """Whether this replica is ready to take the step with those who were found; all its ranks
        say the same."""
        manager, source = self._manager, self._transport.source
        self._transport.source = None
        self._is_first_step = manager.quorum.quorum_id != self._quorum_id
        if not self._is_first_step and not manager.quorum.heal:
            return True
        self._quorum_id = manager.quorum.quorum_id
        problem = manager.errored()
        error: Exception | None = None if problem is None else problem.original_exception
        if error is None and source is not None:
            error = self._receive(source)
        failed = self._mesh.any(error is not None)
        if manager.quorum.heal:
            # What one rank has not, the others must not go on from.
            self._is_whole = not failed
        if failed:
            self._give_up(error)
            return False
        stored = self._mesh.leader_says(self._newest_stored())
        if self._is_taken_back:
            # What is stored by now is of the way that was left: nobody is behind it.
            self._stored_before, self._is_taken_back = max(self._stored_before, stored), False
        self._refuse_what_is_behind(stored)
        self._heals = 0
        count = manager.num_participants()
        logger.info("%s %d on: %d.", TAKES_PART, self._run.cursor, count)
        self._news.append(News("quorum", {"sample": self._run.cursor, "replicas": count}))
        return True

    def _receive(self, source: Source) -> ReplicaError | None:
        """Take over the state of another; what went wrong, if anything did."""
        logger.info("%s, at sample %d.", RECEIVES_STATE, source.progress)
        self._phases.enter(Phase.HEALING, self._run.step)
        self._before_change()
        started_s = time.perf_counter()
        try:
            receive(self._link(source.url), source.progress, self._run)
        except ReplicaError as error:
            return error
        finally:
            self._phases.enter(Phase.QUORUM, self._run.step)
        taken = {"sample": source.progress, "seconds": time.perf_counter() - started_s}
        self._news.append(News("healed", taken))
        return None

    def _give_up(self, error: Exception | None) -> None:
        """Take part in no step of this quorum. Raises ReplicaError where another attempt would end
        in the same way."""
        reason = "another rank of this replica could not join" if error is None else str(error)
        self._manager.fail(reason)
        self._manager.should_commit()
        self._say_failed(reason)
        self._heals += 1
        if self._mesh.any(isinstance(error, Misfit)) or self._heals == _MOST_HEALS:
            raise ReplicaError(f"This replica cannot take part: {reason}")

    def _share(self) -> Share:
        index = self._manager.participating_rank()
        count = self._manager.num_participants()
        return Share(
            index=-1 if index is None else index,
            count=count,
            each_takes_a_batch=self._config.world_size_mode == "dynamic",
        )

    @property
    def coworkers(self) -> Coworkers:
        quorum = self._manager.quorum
        named = " ".join([*sorted(quorum.replica_ids), str(quorum.quorum_id)])
        token = hashlib.blake2b(named.encode(), digest_size=6).hexdigest()
        return Coworkers(quorum.replica_rank, quorum.replica_world_size, token)

    def _refuse_what_is_behind(self, stored: int) -> None:
        """Raise ReplicaError when the run is further on in storage than here."""
        if stored > max(self._run.step, self._stored_before):
            raise ReplicaError(
                f"Step {stored} of this run is stored, and the replicas that were found are at "
                f"step {self._run.step}. This one leaves without taking a step: start it again to "
                "resume from what is stored."
            )

    def sum_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sums.during_backward(parameters)

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        self._sums.sum_(parameters, counts)

    def settle(self, num_ranks: float, places: float, steps: float) -> bool:
        manager, run = self._manager, self._run
        wanted = manager.quorum.replica_world_size * self._mesh.world_size
        if manager.errored() is not None:
            manager.fail("the sums over replicas failed")
        elif (num_ranks, places) != (wanted, wanted * float(run.cursor)):
            manager.fail("a rank was at another place in the run")
        elif steps != wanted * float(run.step):
            # One of them has judged a step unlike the others, and by their places nobody is behind.
            manager.fail("a rank had come to another step at the same place in the run")
            self._is_whole = manager.participating_rank() == 0
        committed = manager.should_commit()
        # One that comes and cannot take part gives up by itself, and must not end the others.
        self._count("steps", committed=committed, is_excused=self._is_first_step)
        return committed

    def _count(self, what: str, *, committed: bool, is_excused: bool = False) -> None:
        """Take note of how one of `what` came out. Raises ReplicaError after too many that failed
        in a row, those aside that are excused."""
        if committed:
            self._failures = 0
            return
        problem = self._manager.errored()
        reason = str(problem.original_exception) if problem else "another rank has given it up"
        self._say_failed(reason)
        self._failures += not is_excused
        if self._failures == _MOST_FAILURES:
            raise ReplicaError(
                f"{_MOST_FAILURES} {what} in a row with the other replicas failed, at last since "
                f"{reason}"
            )

    def synchronize(self) -> None:
        return None

    def exchange(self, counts: torch.Tensor) -> bool:
        self._sums.sum_((), counts)
        return not self._mesh.any(self._manager.errored() is not None)

    def taken_back(self, *, has_state: bool) -> None:
        self._is_whole, self._is_taken_back = has_state, True

    def news(self) -> list[News]:
        found, self._news = self._news, []
        return found

    def close(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._starter.shutdown(wait=False, cancel_futures=True)
        self._manager.shutdown(wait=False)
        if self._mesh.is_leader:
            self._say_goodbye(self._manager.full_id)

    @property
    def _progress(self) -> int:
        """Of what this replica can take a step from, or give."""
        if not self._is_whole:
            return 0
        self._floor.raise_to(self._run.cursor)
        return self._run.cursor

    def _say_failed(self, reason: str) -> None:
        reason = reason.partition("This is typically")[0].strip()
        logger.warning("A step could not be taken with the other replicas: %s", reason)
        self._news.append(News("step_failed", {"reason": reason}))
