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
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from torchtitan_lite.checkpoint.background.coworkers import Coworkers
from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.replica.config import FaultToleranceConfig
from torchtitan_lite.replica.gradient_sums import GradientSums
from torchtitan_lite.replica.guard import Floor
from torchtitan_lite.replica.healing import HealingTransport
from torchtitan_lite.replica.healing.client import Link, TornState, receive
from torchtitan_lite.replica.healing.live_state import Run
from torchtitan_lite.replica.participation import News, Share
from torchtitan_lite.replica.torchft_manager import QuorumManager

_MOST_FAILURES = 20
"""In a row, of steps or of attempts at healing."""


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
    ) -> None:
        """`link` tells how a peer's URL is reached, `newest_stored` the newest step of the run that
        is stored, as the leader sees it, and `before_change` comes back when the state may change.
        `say_goodbye` tells the lighthouse that the replica of this id leaves. Use `join`."""
        self._config, self._run, self._mesh = config, run, mesh
        self._manager, self._transport, self._floor = manager, transport, floor
        self._link, self._newest_stored = link, newest_stored
        self._before_change, self._say_goodbye = before_change, say_goodbye
        self._has_left = False
        self._sums = GradientSums(manager, config.bucket_mib << 20)
        self._starter = ThreadPoolExecutor(1, "quorum")
        self._started: Future[None] | None = None
        self._stored_before = mesh.leader_says(newest_stored())
        self._is_whole = True
        self._quorum_id: int | None = None
        self._failures = 0
        self._sums_agree = True
        self._news: list[News] = []

    def begin(self) -> None:
        self._manager.set_progress(self._progress)
        self._started = self._starter.submit(self._manager.start_quorum)

    def agree(self) -> Share:
        deadline = time.monotonic() + self._config.quorum_timeout_s
        while True:
            if self._started is None:
                self.begin()
            assert self._started is not None
            started, self._started = self._started, None
            try:
                started.result()
            except ReplicaError:
                raise
            except Exception as error:
                # Too few are there, or the lighthouse is gone: both may change.
                self._manager.forget_failed_quorum()
                if time.monotonic() >= deadline:
                    raise ReplicaError(
                        f"No quorum of {self._config.min_replica_size} replicas or more was found "
                        f"in fault_tolerance.quorum_timeout_s = {self._config.quorum_timeout_s:g} "
                        f"seconds: {error}"
                    ) from None
                logger.warning("No quorum yet, asking again: %s", error)
                continue
            if self._joined():
                return self._share()

    def _joined(self) -> bool:
        """Whether this replica is ready to take the step with those who were found; all its ranks
        say the same."""
        manager, source = self._manager, self._transport.source
        self._transport.source = None
        changed = manager.quorum.quorum_id != self._quorum_id
        if not changed and not manager.quorum.heal:
            return True
        self._quorum_id = manager.quorum.quorum_id
        problem = manager.errored()
        error = None if problem is None else str(problem.original_exception)
        if error is None and source is not None:
            logger.info("Receiving the state of another replica, at sample %d.", source.progress)
            self._before_change()
            started = time.perf_counter()
            try:
                receive(self._link(source.url), source.progress, self._run)
                self._is_whole = True
                taken = {"sample": source.progress, "seconds": time.perf_counter() - started}
                self._news.append(News("healed", taken))
            except TornState as torn:
                error, self._is_whole = str(torn), False
            except ReplicaError as refused:
                error = str(refused)
        if manager.quorum.heal:
            # A neighbour that was torn makes this rank's state useless too.
            self._is_whole = not self._mesh.any(not self._is_whole)
        if not self._mesh.any(error is not None):
            self._check_stored()
            count = manager.num_participants()
            logger.info("Replicas that take part from sample %d on: %d.", self._run.cursor, count)
            self._news.append(News("quorum", {"sample": self._run.cursor, "replicas": count}))
            return True
        manager.fail(error or "another rank of this replica could not join")
        manager.should_commit()
        self._count_failure(error or "another rank could not join")
        return False

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

    def _check_stored(self) -> None:
        """Raise ReplicaError when the run is further on in storage than here."""
        stored = self._mesh.leader_says(self._newest_stored())
        if stored > max(self._run.step, self._stored_before):
            raise ReplicaError(
                f"Step {stored} of this run is stored, and the replicas that were found are at "
                f"step {self._run.step}. This one leaves without taking a step: start it again to "
                "resume from what is stored."
            )

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        manager, progress = self._manager, float(self._run.cursor)
        ours = torch.tensor([1.0, progress], dtype=torch.float64, device=counts.device)
        numbers = torch.cat([counts, ours])
        self._sums.sum_(parameters, numbers)
        counts.copy_(numbers[:-2])
        present, places = numbers[-2:].tolist()
        # One that stands by adds nothing.
        count = manager.num_participants()
        self._sums_agree = present == count and places == count * progress

    def settle(self) -> bool:
        manager = self._manager
        if manager.errored() is not None:
            manager.fail("the sums over replicas failed")
        elif not self._sums_agree:
            manager.fail("a replica was at another place in the run")
        if manager.should_commit():
            self._failures = 0
            return True
        problem = manager.errored()
        self._count_failure(
            str(problem.original_exception) if problem else "another rank has given the step up"
        )
        return False

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

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        reason = reason.partition("This is typically")[0].strip()
        logger.warning("A step could not be taken with the other replicas: %s", reason)
        self._news.append(News("step_failed", {"reason": reason, "in_a_row": self._failures}))
        if self._failures == _MOST_FAILURES:
            raise ReplicaError(
                f"{_MOST_FAILURES} attempts in a row at a step with the other replicas failed, at "
                f"last since {reason}"
            )
