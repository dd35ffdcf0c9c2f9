"""Goodput of training under failures, by discrete-event simulation.

Ranks fail independently, with exponentially distributed times between failures. `simulate` follows
one run from failure to failure. Goodput is the useful work done, in units of the work that the same
ranks do without failures and saves in the same time.

Strategies: restart from storage (Young, 1974; Daly, 2006); replicas that continue without a failed
one, as those of torchft, with or without spares; copies in the memory of another machine
("buddies"). Layer: imports nothing of the project.
"""

import heapq
import random
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["restart", "replicas", "buddies"]


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Ranks, and what a failure costs. Times are in seconds. The defaults of recovery are measured
    in `benchmarks/results/recovery.json`."""

    num_ranks: int
    rank_mtbf_s: float
    """Mean time between failures of one rank."""
    strategy: Strategy = "restart"
    num_replicas: int = 1
    """Number of replicas of equal size ("replicas")."""
    num_spares: int = 0
    """Warm spares: one takes the place of what failed in `replace_s`. It is available again after
    `repair_s`."""
    detect_s: float = 0.24
    """Time from a failure until the remaining ranks continue, or until the restart begins."""
    restart_s: float = 10.6
    """Time from the detection until the new process takes part."""
    replace_s: float = 3.0
    """The same for a warm spare."""
    repair_s: float = 3600.0
    """Time until a spare that was used has been replaced."""
    heal_s: float = 0.22
    """Pause of the replicas while another one heals."""
    load_s: float = 10.0
    """Time to load the newest checkpoint from storage."""
    save_s: float = 0.0
    """Time for which a checkpoint blocks training."""
    save_interval_s: float = 600.0
    """Work between checkpoints."""
    buddy_s: float = 0.0
    """Time for which a copy to a buddy blocks training."""
    buddy_interval_s: float = 10.0
    """Work between copies to buddies."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_replicas < 1 or self.num_ranks % self.num_replicas:
            raise ValueError(
                f"num_ranks ({self.num_ranks}) must be a multiple of num_replicas "
                f"({self.num_replicas}), and both at least 1."
            )
        if min(self.rank_mtbf_s, self.save_interval_s, self.buddy_interval_s) <= 0:
            raise ValueError("rank_mtbf_s and the intervals must be above 0.")


@dataclass(frozen=True, kw_only=True)
class PredictedGoodput:
    """Outcome of a simulated run."""

    goodput: float
    """Useful work, as a fraction of the work without failures and saves."""
    num_failures: int
    lost_work_s: float
    """Work that was done again."""


def simulate(model: FailureModel, duration_s: float, seed: int = 0) -> PredictedGoodput:
    """Simulate a run of about `duration_s` of wall time."""
    rng = random.Random(seed)
    run = _Replicas(model, rng) if model.strategy == "replicas" else _OneWorld(model, rng)
    while run.now_s < duration_s:
        run.advance_to_next_failure()
    return PredictedGoodput(
        goodput=run.work_s / run.now_s,
        num_failures=run.num_failures,
        lost_work_s=run.lost_work_s,
    )


class _Spares:
    """Spares, and when those in use are available again."""

    def __init__(self, model: FailureModel) -> None:
        self._model = model
        self._available_s = [0.0] * model.num_spares

    def recovery_s(self, now_s: float) -> float:
        """Take a spare, if one is available, and return the time until the rank is back."""
        if self._available_s and self._available_s[0] <= now_s:
            heapq.heapreplace(self._available_s, now_s + self._model.repair_s)
            return self._model.replace_s
        return self._model.restart_s


class _OneWorld:
    """All ranks stop at each failure, and return to the newest checkpoint or copy."""

    def __init__(self, model: FailureModel, rng: random.Random) -> None:
        self._model, self._rng, self._spares = model, rng, _Spares(model)
        self._mtbf_s = model.rank_mtbf_s / model.num_ranks
        self.now_s = self.work_s = self.lost_work_s = 0.0
        self.num_failures = 0
        self._recovery_s = 0.0
        self._unsaved_s = 0.0
        """Work since the newest checkpoint in storage."""

    def advance_to_next_failure(self) -> None:
        time_s = self._rng.expovariate(1 / self._mtbf_s)
        self.now_s += time_s
        self.num_failures += 1
        working_s = time_s - self._recovery_s
        if working_s < 0:
            # The recovery begins again.
            self._recover(has_buddy=self._buddies_survive(time_s))
            return
        model = self._model
        if model.strategy == "restart":
            interval_s, pause_s = model.save_interval_s, model.save_s
        else:
            # The pauses of the saves are spread over the copies.
            share = model.buddy_interval_s / model.save_interval_s
            interval_s, pause_s = model.buddy_interval_s, model.buddy_s + share * model.save_s
        cycles, rest_s = divmod(working_s, interval_s + pause_s)
        self.work_s += cycles * interval_s
        self.lost_work_s += min(rest_s, interval_s)
        self._unsaved_s = (self._unsaved_s + cycles * interval_s) % model.save_interval_s
        self._recover(has_buddy=self._buddies_survive(working_s))

    def _buddies_survive(self, since_failure_s: float) -> bool:
        """Return whether the failed rank's copy exists: its buddy has not failed since the last
        copy, that is, within the last interval, of which the failure before it is the likeliest."""
        if self._model.strategy != "buddies":
            return False
        was_recent = since_failure_s < self._model.buddy_interval_s
        others = self._model.num_ranks - 1
        return not (others and was_recent and self._rng.random() < 1 / others)

    def _recover(self, *, has_buddy: bool) -> None:
        self._recovery_s = self._model.detect_s + self._spares.recovery_s(self.now_s)
        if has_buddy:
            return
        self._recovery_s += self._model.load_s
        if self._model.strategy == "buddies":
            self.work_s -= self._unsaved_s
            self.lost_work_s += self._unsaved_s
            self._unsaved_s = 0.0


class _Replicas:
    """A failed replica leaves, and the others continue with its share of the global batch."""

    def __init__(self, model: FailureModel, rng: random.Random) -> None:
        self._model, self._rng, self._spares = model, rng, _Spares(model)
        self._replica_mtbf_s = model.rank_mtbf_s * model.num_replicas / model.num_ranks
        self._returns_s: list[float] = []
        """Times at which replicas that failed take part again, a heap."""
        self._paused_until_s = 0.0
        self._unsaved_s = 0.0
        self.now_s = self.work_s = self.lost_work_s = 0.0
        self.num_failures = 0

    def advance_to_next_failure(self) -> None:
        """Advance to the next failure, with the returns before it."""
        while True:
            live = self._model.num_replicas - len(self._returns_s)
            next_return_s = self._returns_s[0] if self._returns_s else float("inf")
            # Exponential times have no memory, so that a new one is drawn after each return.
            rate = live / self._replica_mtbf_s
            failure_s = self.now_s + self._rng.expovariate(rate) if live else float("inf")
            if failure_s < next_return_s:
                break
            self._work_until(next_return_s, live)
            heapq.heappop(self._returns_s)
            self._pause(self._model.heal_s if live else self._model.load_s)
        self._work_until(failure_s, live)
        self.num_failures += 1
        back_s = self._model.detect_s + self._spares.recovery_s(self.now_s)
        heapq.heappush(self._returns_s, self.now_s + back_s)
        if live > 1:
            self._pause(self._model.detect_s)
        else:
            self.work_s -= self._unsaved_s
            self.lost_work_s += self._unsaved_s
            self._unsaved_s = 0.0

    def _pause(self, time_s: float) -> None:
        self._paused_until_s = max(self._paused_until_s, self.now_s + time_s)

    def _work_until(self, end_s: float, live: int) -> None:
        model = self._model
        working_s = max(0.0, end_s - max(self.now_s, self._paused_until_s))
        share = model.save_interval_s / (model.save_interval_s + model.save_s)
        work_s = working_s * share * live / model.num_replicas
        self.work_s += work_s
        self._unsaved_s = (self._unsaved_s + work_s) % model.save_interval_s
        self.now_s = end_s
