"""Simulation of a job without replicas: after each failure all ranks wait until it has recovered.

A failure interrupts the job. Lost machines are replaced by reserve machines, or waited for; the
state comes from shared memory, a buddy machine or storage; a further failure starts the recovery
again. An elastic job (traces) continues on the machines that are left, and takes machines that
arrive after `regrow_after_s` without a change.

Work is counted in machine-seconds of training: a step is `step_s` of all machines.
"""

import math
from collections.abc import Collection
from enum import IntEnum

from torchtitan_lite.tools.failure_model.events import ClusterEvents, EventStream
from torchtitan_lite.tools.failure_model.job_times import JobTimes
from torchtitan_lite.tools.failure_model.strategies import Strategy
from torchtitan_lite.tools.failure_model.time_shares import TimeShares


class StateSource(IntEnum):
    """Source from which a job resumes; the later ones lose more."""

    SNAPSHOT = 0
    BUDDY = 1
    STORAGE = 2


class WholeJob:
    """A job whose ranks all stop when one of them fails."""

    def __init__(
        self,
        strategy: Strategy,
        times: JobTimes,
        present: Collection[int],
        size: int,
        *,
        reserve: int = 0,
        regrow_after_s: float | None = None,
    ) -> None:
        """`present` are the machines at the begin, of which `size` train. With `regrow_after_s`
        the job is elastic: it trains with any number of machines up to `size`, and leaves `reserve`
        of those that are there idle when it is formed or grows."""
        self._strategy, self._times, self._size = strategy, times, size
        self._reserve, self._regrow_after_s = reserve, regrow_after_s
        self._present = set(present)
        self.shares = TimeShares()
        self._now_s = 0.0
        self._members: list[int] = []
        """Machines that train, in the order of the buddies."""
        self._places: dict[int, int] = {}
        """The place of each of them."""
        self._work = 0.0
        self._durable = 0.0
        """Work of the newest save that was durable when the newest save began."""
        self._saved, self._save_durable_s = 0.0, 0.0
        """Work of the newest save, and when it is durable."""
        self._stalled_until_s = 0.0
        self._ready_s: float | None = 0.0
        """End of the recovery; None while the job trains, infinite while it waits for machines."""
        self._source = StateSource.SNAPSHOT
        self._lost_positions: set[int] = set()
        """Members lost since the job last trained."""
        self._new_positions: set[int] = set()
        """Members that hold no copy of another's state until there is one after `_resumed`."""
        self._buddy_work = 0.0
        """Work of the newest complete copies when the job was interrupted."""
        self._resumed = 0.0
        """Work at the last resume."""
        self._changed_s = 0.0
        # The begin of a job is no recovery.
        self._form()
        self._ready_s = None if self._members else math.inf

    @property
    def num_steps(self) -> float:
        """Number of steps that are kept."""
        return self._work / (self._size * self._times.step_s)

    @property
    def is_training(self) -> bool:
        """Whether steps are computed."""
        return self._ready_s is None

    def run(self, events: EventStream, until_s: float) -> TimeShares:
        """Simulate until a time, and return where the time went since the begin."""
        while self._now_s < until_s:
            own_s = min(self._ready_s or math.inf, self._grow_s)
            next_s = min(events.next_s, own_s, until_s)
            self._advance(next_s)
            if events.next_s == next_s < until_s:
                self._apply(events.pop(self._present))
            elif self._ready_s == next_s:
                self._ready_s = None
            elif self._grow_s == next_s:
                self._grow()
        return self.shares

    @property
    def _grow_s(self) -> float:
        """Time at which the job takes idle machines."""
        if self._regrow_after_s is None or not self.is_training or not self._num_to_add:
            return math.inf
        return max(self._now_s, self._changed_s + self._regrow_after_s)

    @property
    def _num_to_add(self) -> int:
        return max(0, self._num_to_use - len(self._members))

    @property
    def _num_to_use(self) -> int:
        """Number of machines of a job that is formed anew."""
        if self._regrow_after_s is None:
            return self._size
        return min(self._size, max(1, len(self._present) - self._reserve))

    @property
    def _idle(self) -> list[int]:
        return sorted(self._present.difference(self._places))

    def _advance(self, until_s: float) -> None:
        times, seconds = self._times, until_s - self._now_s
        capacity = self._size if self._regrow_after_s is None else len(self._present)
        if not self.is_training:
            waits = self._ready_s is not None and math.isinf(self._ready_s)
            part = "waiting" if waits else "recovering"
            setattr(self.shares, part, getattr(self.shares, part) + capacity * seconds)
            self._now_s = until_s
            return
        self.shares.waiting += (capacity - len(self._members)) * seconds
        machines = len(self._members)
        rate = machines * times.training_share
        interval = times.save_interval_s * self._size
        cycle_s = interval / rate + times.save_stall_s
        while self._now_s < until_s:
            if self._now_s < self._stalled_until_s:
                seconds = min(self._stalled_until_s, until_s) - self._now_s
                self.shares.saving += machines * seconds
                self._now_s += seconds
                continue
            # Whole cycles of training and a save at once.
            left_s = max(0.0, self._saved + interval - self._work) / rate
            if left_s >= until_s - self._now_s:
                self._train(until_s - self._now_s, rate)
                self._now_s = until_s
                return
            self._train(left_s, rate)
            self._now_s += left_s
            cycles = int((until_s - self._now_s) // cycle_s)
            if cycles > 1:
                self._train((cycles - 1) * (cycle_s - times.save_stall_s), rate)
                self.shares.saving += machines * (cycles - 1) * times.save_stall_s
                self._saved = self._work - interval
                self._now_s += (cycles - 1) * cycle_s
            # Saves are at least `write_s` apart.
            self._save(times.write_s)
            self._stalled_until_s = self._now_s + times.save_stall_s

    def _train(self, seconds: float, rate: float) -> None:
        self._work += rate * seconds
        self.shares.useful += rate * seconds
        self.shares.saving += (len(self._members) - rate) * seconds

    def _save(self, write_s: float) -> None:
        self._durable = self._newest_durable
        self._saved, self._save_durable_s = self._work, self._now_s + write_s

    @property
    def _newest_durable(self) -> float:
        return self._saved if self._now_s >= self._save_durable_s else self._durable

    def _apply(self, events: ClusterEvents) -> None:
        if events.lost & self._present or events.arrived - self._present:
            self._changed_s = self._now_s
        hit = [
            machine
            for machine in events.lost | events.rank_lost
            if machine in self._present and machine in self._places
        ]
        lost = events.lost.intersection(hit)
        self._present -= events.lost
        self._present |= events.arrived
        if hit:
            self._lost_positions |= {self._places[machine] for machine in lost}
            self._resume_from(self._source_for())
            self._form()
        elif self._ready_s is not None and math.isinf(self._ready_s):
            self._form(was_waiting=True)

    def _source_for(self) -> StateSource:
        """Return where the job resumes from."""
        if not self._strategy.snapshots:
            return StateSource.STORAGE
        if not self._lost_positions:
            return StateSource.SNAPSHOT
        if not self._strategy.buddies:
            return StateSource.STORAGE
        gone = self._lost_positions | self._without_copy
        count = len(self._members)
        have_buddy = all((position + 1) % count not in gone for position in self._lost_positions)
        return StateSource.BUDDY if have_buddy else StateSource.STORAGE

    @property
    def _copied(self) -> float:
        """Work of the newest complete copy on the buddy machines."""
        rate = len(self._members) * self._times.training_share
        complete = self._work - self._times.buddy_copy_s * rate
        interval = self._times.buddy_interval_s * self._size
        copied = math.floor(complete / interval + 1e-9) * interval
        return copied if copied > self._resumed else self._buddy_work

    @property
    def _without_copy(self) -> set[int]:
        return self._new_positions if self._copied <= self._resumed else set()

    def _resume_from(self, source: StateSource) -> None:
        """Interrupt the job, or its recovery, and go back to the state that is left."""
        self._source = source if self.is_training else max(source, self._source)
        durable, self._buddy_work = self._newest_durable, self._copied
        interval = self._times.snapshot_interval_s * self._size
        snapshot = math.floor(self._work / interval + 1e-9) * interval
        left = {
            # A recovery that is interrupted resumes from the same snapshot.
            StateSource.SNAPSHOT: snapshot if self.is_training else self._work,
            StateSource.BUDDY: self._buddy_work,
            StateSource.STORAGE: 0.0,
        }[self._source]
        if durable > left:
            self._source = StateSource.STORAGE
        work = min(self._work, max(left, durable))
        self.shares.lose(self._work - work)
        self._work = work
        # A save in progress ends with the job.
        self._durable = self._saved = durable
        self._save_durable_s = self._stalled_until_s = self._now_s

    def _form(self, *, was_waiting: bool = False) -> None:
        """Complete the members, and recover with them or wait."""
        idle = self._idle
        places = sorted(self._lost_positions)
        missing = [place for place in places if self._members[place] not in self._present]
        is_same_size = bool(self._members) and len(missing) <= len(idle)
        if is_same_size:
            for place, machine in zip(missing, idle, strict=False):
                self._places.pop(self._members[place])
                self._members[place], self._places[machine] = machine, place
        elif self._regrow_after_s is None and self._members:
            self._ready_s = math.inf
            return
        else:
            # On another number of machines the job resumes from storage.
            if self._lost_positions:
                self._resume_from(StateSource.STORAGE)
            survivors = [member for member in self._members if member in self._present]
            self._members = (survivors + idle)[: self._num_to_use]
            self._places = {member: place for place, member in enumerate(self._members)}
            self._lost_positions = set(range(len(self._members)))
            self._buddy_work = 0.0
        if not self._members:
            self._ready_s = math.inf
            return
        in_place = self._strategy.in_place and is_same_size and not was_waiting
        seconds = self._times.spare_s if in_place else self._times.restart_s
        # A job that waited for machines has noticed the loss before.
        is_lost = bool(places) and not was_waiting
        self._recover(seconds + (self._times.machine_loss_s if is_lost else 0.0))

    def _recover(self, seconds: float) -> None:
        times = self._times
        load_s = {
            StateSource.SNAPSHOT: times.snapshot_load_s,
            StateSource.BUDDY: times.transfer_s,
            StateSource.STORAGE: times.load_s,
        }[self._source]
        self._ready_s = self._now_s + seconds + load_s
        self._new_positions = self._lost_positions | self._without_copy
        self._lost_positions, self._resumed = set(), self._work

    def _grow(self) -> None:
        """Save, and start again on more machines. The state is saved before the job stops."""
        self._save(self._times.write_s)
        self._members += self._idle[: self._num_to_add]
        self._places = {member: place for place, member in enumerate(self._members)}
        self._lost_positions = set(range(len(self._members)))
        self._source, self._buddy_work = StateSource.STORAGE, 0.0
        self._recover(self._times.write_s + self._times.restart_s)
