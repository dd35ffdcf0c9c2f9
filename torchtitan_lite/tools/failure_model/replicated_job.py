"""Simulation of a job with replicas: the others continue when one of them fails.

A failure aborts the step of all replicas and stalls them; a replica that died starts again, with a
reserve machine if one of its own was lost, and heals from the others. Machines of an incomplete
replica wait for a replacement, or complete another one. The samples of a missing replica are
computed by the others (this project) or left out (torchft): either way the job computes as many
samples per second as its machines can. After all replicas have died, the job resumes from shared
memory or storage.
"""

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

from torchtitan_lite.tools.failure_model.events import ClusterEvents, EventStream
from torchtitan_lite.tools.failure_model.job_times import JobTimes
from torchtitan_lite.tools.failure_model.strategies import Strategy
from torchtitan_lite.tools.failure_model.time_shares import TimeShares


@dataclass(kw_only=True)
class _Starting:
    """A replica that starts."""

    machines: set[int]
    ready_s: float
    has_loaded: bool = False
    """Whether it has state of its own to continue from, when there is no donor."""


class ReplicatedJob:
    """A job of up to `size` machines in replicas."""

    def __init__(
        self,
        strategy: Strategy,
        times: JobTimes,
        present: Collection[int],
        size: int,
        *,
        is_elastic: bool = False,
    ) -> None:
        """`present` are the machines at the begin. An elastic job (traces) is measured by the
        machines that are there, another one by `size`."""
        self._strategy, self._times, self._size = strategy, times, size
        self._is_elastic = is_elastic
        self._present = set(present)
        self._num_replicas = size // times.machines_per_replica
        self._live: list[set[int]] = []
        self._starting: list[_Starting] = []
        self.shares = TimeShares()
        self._now_s = 0.0
        self._stalled_until_s = 0.0
        self._step_began_s = 0.0
        self._work = 0.0
        self._stepping_s = 0.0
        """Training time of the kept steps, however many replicas take part."""
        self._history: list[tuple[float, float]] = [(0.0, 0.0)]
        """Times and the work until then, since all replicas last began; linear in between."""
        self._died_s = 0.0
        """When the last live replica died."""
        self._needs_storage = False
        """Whether the state of the job, all of whose replicas have died, is only in storage."""
        self._start_replicas()
        # The begin of a job is no recovery.
        self._live, self._starting = [replica.machines for replica in self._starting], []

    def run(self, events: EventStream, until_s: float) -> TimeShares:
        """Simulate until a time, and return where the time went since the begin."""
        while self._now_s < until_s:
            ready_s = min((replica.ready_s for replica in self._starting), default=math.inf)
            next_s = min(events.next_s, ready_s, until_s)
            self._advance(next_s)
            if events.next_s == next_s < until_s:
                self._apply(events.pop(self._present))
            elif ready_s == next_s:
                for replica in [replica for replica in self._starting if replica.ready_s == next_s]:
                    self._join(replica)
        return self.shares

    @property
    def _training_machines(self) -> int:
        return len(self._live) * self._times.machines_per_replica

    @property
    def _compute_s(self) -> float:
        """Duration of a step without the exchange: the live replicas of this project compute the
        samples of all."""
        if self._strategy.replicas == "torchft" or not self._live:
            return self._times.step_s
        return self._times.step_s * self._num_replicas / len(self._live)

    @property
    def num_steps(self) -> float:
        """Number of steps that are kept. A step of torchft's replicas lacks the samples of the
        missing ones; one of this project's replicas has all, and takes longer."""
        if self._strategy.replicas == "torchft":
            return self._stepping_s / self._times.step_s
        return self._work / (self._size * self._times.step_s)

    @property
    def _exchange_s(self) -> float:
        """Time that a step waits for the sum of the gradients; none with a single live replica."""
        return self._times.exchange_s if len(self._live) > 1 else 0.0

    @property
    def _step_s(self) -> float:
        return self._compute_s + self._exchange_s

    def _cycle_s(self, exchange_s: float, compute_s: float) -> float:
        """Return the time from one save to the next."""
        times = self._times
        exchanges_s = exchange_s * times.save_interval_s / compute_s
        return times.save_interval_s / times.training_share + exchanges_s + times.save_stall_s

    @property
    def _full_cycle_s(self) -> float:
        """Time from one save to the next while all replicas are live."""
        return self._cycle_s(self._times.exchange_s, self._times.step_s)

    @property
    def _useful_share(self) -> float:
        """Share of the training time in which steps are computed, and not exchanges, saves and
        snapshots."""
        return self._times.save_interval_s / self._cycle_s(self._exchange_s, self._compute_s)

    def _advance(self, until_s: float) -> None:
        seconds = until_s - self._now_s
        machines, capacity = self._training_machines, self._size
        if self._is_elastic:
            capacity = len(self._present)
        stalled_s = min(max(0.0, self._stalled_until_s - self._now_s), seconds)
        starting = sum(len(replica.machines) for replica in self._starting)
        self.shares.recovering += machines * stalled_s + starting * seconds
        self.shares.waiting += (capacity - machines - starting) * seconds
        trained = machines * (seconds - stalled_s)
        exchange_share = self._useful_share * self._exchange_s / self._compute_s
        self.shares.useful += trained * self._useful_share
        self.shares.exchanging += trained * exchange_share
        self.shares.saving += trained * (1 - self._useful_share - exchange_share)
        if self._live:
            self._stepping_s += (seconds - stalled_s) * self._useful_share
        if stalled_s:
            self._history.append((self._now_s + stalled_s, self._work))
        self._work += trained * self._useful_share
        self._now_s = until_s
        self._history.append((until_s, self._work))
        self._forget()

    def _apply(self, events: ClusterEvents) -> None:
        lost = events.lost & self._present
        hit = lost | events.rank_lost & self._present
        dead = [replica for replica in self._live if not replica.isdisjoint(hit)]
        if dead:
            self._abort_step()
        self._present -= events.lost
        self._present |= events.arrived
        if dead:
            self._live = [replica for replica in self._live if replica.isdisjoint(hit)]
        self._starting = [replica for replica in self._starting if replica.machines.isdisjoint(hit)]
        if dead and self._live:
            loss_s = self._times.machine_loss_s if lost else 0.0
            self._stall(self._times.replica_stall_s + loss_s)
        elif dead:
            self._died_s = self._now_s
            self._needs_storage = bool(lost) or not self._strategy.snapshots
            self._roll_back()
        elif lost and not self._live:
            self._needs_storage = True
            self._roll_back()
        self._start_replicas()

    def _abort_step(self) -> None:
        """Lose what all live replicas have computed of the step."""
        if self._now_s <= max(self._stalled_until_s, self._step_began_s):
            return
        elapsed_s = (self._now_s - self._step_began_s) % self._step_s
        self._lose(elapsed_s * self._training_machines * self._useful_share)
        self._stepping_s -= elapsed_s * self._useful_share

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._now_s) + seconds
        self._step_began_s = self._stalled_until_s

    def _roll_back(self) -> None:
        """Return to the newest state that is left after the death of all replicas."""
        times = self._times
        if self._needs_storage:
            began_s, began = self._history[0]
            cycle_s = self._full_cycle_s
            saves = max(0, math.floor((self._died_s - times.write_s - began_s) / cycle_s))
            left = self._work_at(began_s + saves * cycle_s) if saves else began
        else:
            interval = times.snapshot_interval_s * self._size
            left = math.floor(self._work / interval + 1e-9) * interval
        lost = max(0.0, self._work - left)
        self._lose(lost)
        self._stepping_s -= lost / self._size

    def _lose(self, work: float) -> None:
        self.shares.lose(work)
        self._work -= work
        self._history.append((self._now_s, self._work))

    def _work_at(self, at_s: float) -> float:
        place = bisect_right(self._history, at_s, key=lambda entry: entry[0])
        if place == len(self._history):
            return self._work
        (from_s, before), (to_s, after) = self._history[place - 1], self._history[place]
        return before + (after - before) * (at_s - from_s) / (to_s - from_s)

    def _forget(self) -> None:
        """Drop the history before the saves that are the newest durable one from now on."""
        if len(self._history) < 1000:
            return
        cycle_s = self._full_cycle_s
        began_s = self._history[0][0]
        saves = math.floor((self._now_s - self._times.write_s - began_s) / cycle_s) - 1
        if saves > 0:
            at_s = began_s + saves * cycle_s
            kept = [entry for entry in self._history if entry[0] > at_s]
            self._history = [(at_s, self._work_at(at_s)), *kept]

    def _start_replicas(self) -> None:
        """Start replicas on the machines that belong to none."""
        taken = set[int]().union(*self._live, *(replica.machines for replica in self._starting))
        free = sorted(self._present - taken)
        count = self._times.machines_per_replica
        while len(free) >= count and len(self._live) + len(self._starting) < self._num_replicas:
            machines, free = set(free[:count]), free[count:]
            ready_s = self._now_s + self._times.replica_restart_s
            self._starting.append(_Starting(machines=machines, ready_s=ready_s))

    def _join(self, replica: _Starting) -> None:
        """Let a replica that has started heal from the others, or restore the state."""
        times = self._times
        if not self._live and not replica.has_loaded:
            replica.has_loaded = True
            restore_s = times.load_s if self._needs_storage else times.snapshot_load_s
            replica.ready_s = self._now_s + restore_s
            return
        self._starting.remove(replica)
        if self._live:
            # The transfer overlaps with the computation of a step.
            self._stall(times.donor_stall_s + max(0.0, times.transfer_s - self._step_s))
        else:
            self._step_began_s = self._now_s
            self._history = [(self._now_s, self._work)]
        self._live.append(replica.machines)
