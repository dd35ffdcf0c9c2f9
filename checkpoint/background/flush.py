"""The flush after a trainer's death: its newest step that all ranks hold is saved within a grace
period.

The trainer of rank r was killed, so its writer reads the end of its orders. Other trainers may live
on for a while, because they finish a copy, or wait for r until the launcher stops them.

On one machine, where all regions are visible:

1. The orphaned writer reads all headers and picks the newest step that is complete in all regions.
It cannot exceed rank r's own newest step, so if it equals that, the decision is final. Otherwise
the writer polls until the others are done, at most `others_s`.

2. It publishes the decision as a file in the run's folder, one per generation: the first one wins,
   and all writers follow it.

3. Every writer that sees the decision writes its part of that step, whether or not its trainer is
alive: the slot of the newest common step is not reused before a newer common step exists, which
will not happen. No two processes ever write the same file.

4. A writer that was killed, too, has released its lock. An orphaned writer acquires that lock and
writes the part in its place, and commits in its place if it was the leader's.

5. The leader's writer commits once all parts are present.

An orphaned writer of another rank watches until the step is stored or its grace period ends,
because the leader's writer may be killed, too.

If not all regions are visible (several machines), the writers cannot agree. The newest common step
is then one of at most two steps of each rank: the newest confirmed one, and a later one. Each
orphaned writer writes both, newest first, under the token of a trainer's first attempt, so parts
that were ordered count, too. The leader commits what becomes complete, until the newest is
committed or the grace period ends. Parts of a lost machine never arrive: once only the leader's
writer is left, the next generation, which waits for it, lets it end.

Invariant: a step is committed only from parts of one generation.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.background.save import RankSave, attempt_token, log_to_stderr
from torchtitan_lite.checkpoint.history.fencing_tokens import SupersededError
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock, region_files
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import CheckpointError, WriteAbandoned

_SLACK_S = 1.0
"""Time for a process to exit."""
_POLL_S = 0.02
_WATCH_S = 0.2
_RETRY_S = 0.5
_DECISION = "flush-"
_REQUEST = "leave-"
_LAST_WRITER = "last-"
SaveAttempt = tuple[int, str]
"""A step, and the token of an attempt at it."""


def max_wait_s(grace_s: float) -> float:
    """Return how long a successor may have to wait for a writer."""
    return grace_s + _SLACK_S


def mark_last_writer(region_path: Path) -> None:
    """Let the orphaned leader's writer of a region end once its own part is written: the writers of
    all other ranks have ended. Raises OSError or DamagedSnapshot."""
    region = Region.open(region_path)
    region.close()
    _last_writer_path(region).touch(mode=0o600)


def _last_writer_path(region: Region) -> Path:
    """Return the file that `mark_last_writer` creates. It is named after the region's token, so
    those of earlier generations do not match."""
    return region.path.with_name(f"{_LAST_WRITER}{region.token}")


class GracePeriodExpired(WriteAbandoned):
    """A write exceeded the grace period."""


@dataclass(frozen=True)
class GracePeriod:
    """Time that a writer has after its trainer's end: `preemption_grace_s`. Nothing begins later,
    and writes in progress are stopped."""

    since: float
    """When the trainer's end was detected (time.monotonic())."""
    grace_s: float

    @property
    def has_time(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.since + self.grace_s

    def tick(self) -> None:
        """Raise GracePeriodExpired after the grace period. Called between the chunks of a write."""
        self._require(self.grace_s)

    def tick_at_half(self) -> None:
        """Raise GracePeriodExpired after half of the grace period: the rest is reserved for a newer
        step than the one in progress."""
        self._require(self.grace_s / 2)

    def _require(self, limit_s: float) -> None:
        if time.monotonic() >= self.since + limit_s:
            raise GracePeriodExpired(f"not written within {limit_s:g} s after the trainer's end")


class VisibleRanks:
    """Ranks of this generation whose regions are visible."""

    def __init__(self, own: RankSave) -> None:
        self.own = own
        self.saves: dict[int, RankSave] = {own.about.rank: own}
        self.folder: Path = own.region.path.parent

    def refresh(self) -> bool:
        """Open new regions, and return whether all ranks are visible now."""
        about = self.own.about
        for rank, path in region_files(self.folder).items():
            if rank not in self.saves and rank < about.world_size:
                with suppress(CheckpointError, OSError):
                    save = RankSave(Region.open(path), self.own.storage)
                    save.fencing_tokens = self.own.fencing_tokens
                    save.writer_group = self.own.writer_group
                    if (save.about.generation_id, save.about.rank) == (about.generation_id, rank):
                        self.saves[rank] = save
        return len(self.saves) == about.world_size

    def common_step(self) -> int | None:
        """Return the newest step that is complete in all visible regions."""
        common = set.intersection(*(set(save.complete_slots()) for save in self.saves.values()))
        return max(common, default=None)

    def decision_path(self) -> Path:
        """Return the file of the decision, if all ranks are visible. It is named after the regions'
        tokens, so decisions of earlier generations do not match."""
        tokens = "".join(self.saves[rank].region.token for rank in sorted(self.saves))
        return self.folder / f"{_DECISION}{xxhash.xxh3_64_hexdigest(tokens.encode())}.json"

    def request_save(self, step: int) -> None:
        """Request that all writers of this machine save `step`, with or without an order."""
        (self.folder / f"{self._request_prefix()}{step}").touch(mode=0o600)

    def requested_saves(self) -> set[int]:
        """Return the steps requested by writers of this generation."""
        if not any(name.startswith(_REQUEST) for name in os.listdir(self.folder)):
            return set()
        requests = self.folder.glob(f"{self._request_prefix()}*")
        steps = (path.name.rpartition("-")[2] for path in requests)
        return {int(step) for step in steps if step.isdigit()}

    def _request_prefix(self) -> str:
        return f"{_REQUEST}{self.own.about.generation_id}-"

    def close(self) -> None:
        """Unmap the other ranks' regions."""
        for rank, save in self.saves.items():
            if rank != self.own.about.rank:
                save.region.close()


def read_decision(ranks: VisibleRanks) -> SaveAttempt | None:
    """Return the decision of an orphaned writer, if there is one."""
    try:
        if not any(name.startswith(_DECISION) for name in os.listdir(ranks.folder)):
            return None
        if not ranks.refresh():
            return None
        decision = json.loads(ranks.decision_path().read_bytes())
        return int(decision["step"]), str(decision["token"])
    except FileNotFoundError:
        return None


def flush(
    own: RankSave,
    *,
    pending: Iterable[SaveAttempt],
    direct: bool,
    grace: GracePeriod,
    others_s: float,
) -> list[int]:
    """Write what the death of this rank's trainer would lose, and return the steps that were
    stored: none if the state does not belong to the run any more.

    `pending`: saves whose own part is written and that the leader has not committed yet.
    """
    ranks = VisibleRanks(own)
    try:
        own.check_fencing()
        stored = _newest_stored(own)
        if ranks.refresh():
            wanted = _decide(ranks, pending, grace.since + others_s)
        else:
            wanted = _decide_alone(own)
        wanted = [attempt for attempt in wanted if attempt[0] > stored]
        # Saves in progress are older or equal, and still better than nothing.
        under_way = {attempt for attempt in pending if attempt[0] > stored}
        return _Flush(ranks, grace, direct=direct).run(wanted, under_way)
    except SupersededError as error:
        log_to_stderr(f"Rank {own.about.rank} stores nothing: {error}")
        return []
    finally:
        ranks.close()


class _Flush:
    """Writes and commits for this rank, and for ranks whose writers are dead."""

    def __init__(self, ranks: VisibleRanks, grace: GracePeriod, *, direct: bool) -> None:
        self._ranks, self._grace, self._direct = ranks, grace, direct
        self._sees_all = len(ranks.saves) == ranks.own.about.world_size
        self._locks: dict[int, RankLock] = {}

    def run(self, wanted: Sequence[SaveAttempt], under_way: Set[SaveAttempt]) -> list[int]:
        """Write the attempts `wanted`, newest first, and after each part commit those of `wanted`
        and `under_way` that are complete. A writer that leads no rank stops once it is not needed,
        and the leader's stops once no other writer is left."""
        committed: list[int] = []
        unwritten, left = list(wanted), {*wanted, *under_way}
        next_try = 0.0
        try:
            while left:
                # Read before the parts are listed, so that the list is final.
                is_last = self._is_last_writer()
                if unwritten and self._grace.has_time and time.monotonic() >= next_try:
                    if self._write(self._ranks.own, *unwritten[0]):
                        unwritten.pop(0)
                    else:
                        # Meanwhile an older step is better than none.
                        unwritten.append(unwritten.pop(0))
                        next_try = time.monotonic() + _RETRY_S
                if wanted and wanted[0] not in unwritten:
                    self._write_for_dead_ranks(*wanted[0])
                leader = self._leader()
                done = self._commit_newest(leader, left) if leader else None
                if done is None and leader is not self._ranks.own:
                    # Committed by another writer, which may have died since.
                    done = self._stored_of(left)
                if done is not None:
                    committed.append(done)
                    # Older steps would only delay the successor.
                    left = {attempt for attempt in left if attempt[0] > done}
                    unwritten = [attempt for attempt in unwritten if attempt in left]
                if not (self._grace.has_time and (leader or self._sees_all or unwritten)):
                    break
                if is_last and not unwritten:
                    break
                if left:
                    time.sleep(_POLL_S if leader else _WATCH_S)
        finally:
            for lock in self._locks.values():
                lock.release()
        return committed

    def _is_last_writer(self) -> bool:
        """Return whether only this process still writes parts. One that sees all ranks also writes
        those of dead ones."""
        return not self._sees_all and _last_writer_path(self._ranks.own.region).exists()

    def _write(self, save: RankSave, step: int, token: str) -> bool:
        """Write a rank's part unless it is present. Returns False, after logging an error, if it
        must be retried."""
        if not self._grace.has_time:
            return False
        try:
            save.write_missing(step, token, direct=self._direct, tick=self._grace.tick)
        except (OSError, CheckpointError, GracePeriodExpired) as error:
            log_to_stderr(f"Rank {save.about.rank} could not flush step {step}: {error}")
            return False
        return True

    def _write_for_dead_ranks(self, step: int, token: str) -> None:
        """Write the parts of ranks whose writers are dead."""
        own = self._ranks.own
        if not self._sees_all:
            return
        try:
            present = own.announcements(step, token).parts
        except OSError:
            return
        for rank, save in self._ranks.saves.items():
            is_own = rank == own.about.rank
            if is_own or rank in self._locks or (rank in present and not save.about.is_leader):
                continue
            lock = RankLock(self._ranks.folder, rank)
            if lock.try_acquire():
                self._locks[rank] = lock
        for rank in (*self._locks, own.about.rank):
            if rank not in present:
                self._write(self._ranks.saves[rank], step, token)

    def _leader(self) -> RankSave | None:
        """Return the leader's region, if this process may act for it."""
        held = {self._ranks.own.about.rank, *self._locks}
        saves = [self._ranks.saves[rank] for rank in held]
        return next((save for save in saves if save.about.is_leader), None)

    def _commit_newest(self, leader: RankSave, left: Set[SaveAttempt]) -> int | None:
        """Commit the newest complete step and return it."""
        for step, token in sorted(left, reverse=True):
            try:
                announced = leader.announcements(step, token)
                if leader.is_complete(announced):
                    leader.commit(step, token, announced)
                    return step
            except SupersededError:
                raise
            except (OSError, CheckpointError) as error:
                log_to_stderr(
                    f"Step {step} could not be committed in {leader.storage.root}: {error}"
                )
        return None

    def _stored_of(self, left: Set[SaveAttempt]) -> int | None:
        """Return the newest step that is stored already, by any process."""
        try:
            stored = set(self._ranks.own.storage.steps())
        except OSError:
            return None
        return max((step for step, _ in left if step in stored), default=None)


def _newest_stored(own: RankSave) -> int:
    """Return -1 also if the storage cannot be listed."""
    try:
        return own.newest_stored()
    except OSError as error:
        log_to_stderr(f"The checkpoints in {own.storage.root} cannot be listed: {error}")
        return -1


def _decide_alone(own: RankSave) -> list[SaveAttempt]:
    return [
        (step, attempt_token(own.about.generation_id, step)) for step in own.possibly_common_steps()
    ]


def _decide(
    ranks: VisibleRanks, pending: Iterable[SaveAttempt], deadline: float
) -> list[SaveAttempt]:
    """Return what all writers of this machine flush: one step, or none if none is complete."""
    bound = max(ranks.own.complete_slots(), default=None)
    while True:
        decided = read_decision(ranks)
        if decided is not None:
            return [decided]
        if bound is None:
            return []
        step = ranks.common_step()
        is_late = time.monotonic() >= deadline
        if step is not None and (step == bound or is_late):
            token = attempt_token(ranks.own.about.generation_id, step)
            try:
                _publish(ranks.decision_path(), step, dict(pending).get(step, token))
            except OSError as error:
                log_to_stderr(f"The flush decision cannot be published in {ranks.folder}: {error}")
                return _decide_alone(ranks.own)
        elif is_late:
            return []
        else:
            time.sleep(_POLL_S)


def _publish(path: Path, step: int, token: str) -> None:
    """Publish a decision unless there is one, in which case the link fails. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"step": step, "token": token}))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
