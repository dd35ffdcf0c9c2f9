"""What writers do when a trainer died: the newest step that all ranks hold goes to storage.

The trainer of rank r was killed, so its writer reads the end of its orders. The others' trainers
may live on for a while, since they finish a copy, or wait for r until the launcher ends them.

On one machine, where every rank's region can be seen:

1. The orphaned writer reads all headers and takes the newest step that is complete in all of them.
   No newer one can come about than rank r's own newest, so if that is it, it is decided. Else it
   looks again until the others are done, at most `others_s`.
2. It publishes the decision as a file in the run's folder, of which there is one for each start of
   the run: the first one stands, all follow it.
3. Every writer that sees the decision writes its part of that step, whether its own trainer is
   dead or not: a slot with the newest step that all have is not used again before all have a newer
   one, which they never will. So no two processes ever write the same file.
4. A writer that was killed, too, has let go of its lock. An orphaned writer takes that lock and
   writes the part in its place, and commits in its place if that was the leader.
5. The leader's writer commits when all parts are there.

An orphaned writer that is not the leader's looks on until the step is stored or its own grace
ends: the leader's may be killed, too.

Where not all regions can be seen (several machines), there is nobody to agree with. The newest
step that all have is then one of at most two of a rank's own: that which it knows all to have, and
a newer one. Each orphaned writer writes these, newest first, under the names that the trainer gives
to a first attempt, so that parts that were ordered count, too. The leader commits what becomes
whole, until the newest has or the grace ends.

Invariant: a step is committed only from parts of one start of the run. Layer: above save.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.background.grace import Grace, OutOfTime
from torchtitan_lite.checkpoint.background.save import RankSave, attempt_token, report
from torchtitan_lite.checkpoint.memory.folder import regions_in
from torchtitan_lite.checkpoint.memory.lock import RankLock
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.errors import CheckpointError

_POLL_S = 0.02
_LOOKING_ON_S = 0.2
_RETRY_S = 0.5
_PREFIX = "flush-"
_ASKING = "leave-"

Attempt = tuple[int, str]
"""A step, and the token of an attempt at it."""


class Ranks:
    """The ranks of this start of the run whose regions can be seen."""

    def __init__(self, own: RankSave) -> None:
        self.own = own
        self.saves: dict[int, RankSave] = {own.about.rank: own}
        self.folder: Path = own.region.path.parent

    def look(self) -> bool:
        """Open the regions that have come into being; whether all ranks can be seen now."""
        about = self.own.about
        for rank, path in regions_in(self.folder).items():
            if rank not in self.saves and rank < about.world_size:
                with suppress(CheckpointError, OSError):
                    save = RankSave(Region.open(path), self.own.storage)
                    if (save.about.session, save.about.rank) == (about.session, rank):
                        self.saves[rank] = save
        return len(self.saves) == about.world_size

    def common_step(self) -> int | None:
        """The newest step that is complete in all regions seen."""
        common = set.intersection(*(set(save.complete_slots()) for save in self.saves.values()))
        return max(common, default=None)

    def decision_path(self) -> Path:
        """The file of the decision, when all can be seen: named after these very regions, so that
        a decision of an earlier start is never taken for one of this."""
        tokens = "".join(self.saves[rank].region.token for rank in sorted(self.saves))
        return self.folder / f"{_PREFIX}{xxhash.xxh3_64_hexdigest(tokens.encode())}.json"

    def ask_for(self, step: int) -> None:
        """Let the writers of this machine save `step`, whether or not their trainers say so."""
        (self.folder / f"{self._asking()}{step}").touch(mode=0o600)

    def asked_for(self) -> set[int]:
        """The steps that writers of this start have asked for."""
        if not any(name.startswith(_ASKING) for name in os.listdir(self.folder)):
            return set()
        found = self.folder.glob(f"{self._asking()}*")
        steps = (path.name.rpartition("-")[2] for path in found)
        return {int(step) for step in steps if step.isdigit()}

    def _asking(self) -> str:
        return f"{_ASKING}{self.own.about.session}-"

    def close(self) -> None:
        """Unmap the others' regions."""
        for rank, save in self.saves.items():
            if rank != self.own.about.rank:
                save.region.close()


def published(ranks: Ranks) -> Attempt | None:
    """What an orphaned writer decided on, if one has."""
    try:
        if not any(name.startswith(_PREFIX) for name in os.listdir(ranks.folder)):
            return None
        if not ranks.look():
            return None
        given = json.loads(ranks.decision_path().read_bytes())
        return int(given["step"]), str(given["token"])
    except FileNotFoundError:
        return None


def flush(
    own: RankSave,
    *,
    pending: Iterable[Attempt],
    direct: bool,
    grace: Grace,
    others_s: float,
) -> list[int]:
    """Write what the death of this rank's trainer would lose, and return the steps that have come
    to storage.

    `pending`: the saves whose own part is written and that the leader has still to commit.
    """
    ranks = Ranks(own)
    try:
        stored = _newest_stored(own)
        if ranks.look():
            wanted = _decide(ranks, pending, grace.since + others_s)
        else:
            wanted = _each_for_itself(own)
        wanted = [attempt for attempt in wanted if attempt[0] > stored]
        # What was under way is older or the same, and still better than nothing.
        under_way = {attempt for attempt in pending if attempt[0] > stored}
        return _Flush(ranks, grace, direct=direct).run(wanted, under_way)
    finally:
        ranks.close()


def _newest_stored(own: RankSave) -> int:
    """-1 also where the storage does not say."""
    try:
        return own.newest_stored()
    except OSError as error:
        report(f"The checkpoints in {own.storage.root} cannot be listed: {error}")
        return -1


def _each_for_itself(own: RankSave) -> list[Attempt]:
    return [(step, attempt_token(own.about.session, step)) for step in own.perhaps_common()]


def _decide(ranks: Ranks, pending: Iterable[Attempt], deadline: float) -> list[Attempt]:
    """What all writers of this machine flush: one step, or none where none is complete."""
    bound = max(ranks.own.complete_slots(), default=None)
    while True:
        decided = published(ranks)
        if decided is not None:
            return [decided]
        if bound is None:
            return []
        step = ranks.common_step()
        is_late = time.monotonic() >= deadline
        if step is not None and (step == bound or is_late):
            token = attempt_token(ranks.own.about.session, step)
            try:
                _publish(ranks.decision_path(), step, dict(pending).get(step, token))
            except OSError as error:
                report(f"What to save cannot be agreed on in {ranks.folder}: {error}")
                return _each_for_itself(ranks.own)
        elif is_late:
            return []
        else:
            time.sleep(_POLL_S)


def _publish(path: Path, step: int, token: str) -> None:
    """Publish a decision unless there is one: the link fails then. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"step": step, "token": token}))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Flush:
    """Parts written for this rank and for ranks whose writers are gone."""

    def __init__(self, ranks: Ranks, grace: Grace, *, direct: bool) -> None:
        self._ranks, self._grace, self._direct = ranks, grace, direct
        self._sees_all = len(ranks.saves) == ranks.own.about.world_size
        self._locks: dict[int, RankLock] = {}

    def run(self, wanted: Sequence[Attempt], under_way: Set[Attempt]) -> list[int]:
        """Write what is `wanted`, newest first, and commit, after each part, what is whole of that
        and of what is `under_way`. A writer that leads no rank ends once nobody needs it."""
        committed: list[int] = []
        unwritten, left = list(wanted), {*wanted, *under_way}
        next_try = 0.0
        try:
            while left:
                if unwritten and self._grace.may_begin and time.monotonic() >= next_try:
                    if self._write(self._ranks.own, *unwritten[0]):
                        unwritten.pop(0)
                    else:
                        # Rather an older one meanwhile than none.
                        unwritten.append(unwritten.pop(0))
                        next_try = time.monotonic() + _RETRY_S
                if wanted and wanted[0] not in unwritten:
                    self._stand_in(*wanted[0])
                leader = self._leader()
                done = self._commit_newest(leader, left) if leader else None
                if done is None and leader is not self._ranks.own:
                    # By another writer, which may have died since.
                    done = self._stored_of(left)
                if done is not None:
                    committed.append(done)
                    # Older ones would only delay the successor.
                    left = {attempt for attempt in left if attempt[0] > done}
                    unwritten = [attempt for attempt in unwritten if attempt in left]
                if not (self._grace.may_begin and (leader or self._sees_all or unwritten)):
                    break
                if left:
                    time.sleep(_POLL_S if leader else _LOOKING_ON_S)
        finally:
            for lock in self._locks.values():
                lock.release()
        return committed

    def _write(self, save: RankSave, step: int, token: str) -> bool:
        """Write a rank's part, unless it is there. False when it is to be tried again; with a
        report, when it failed."""
        if not self._grace.may_begin:
            return False
        try:
            save.write_missing(step, token, direct=self._direct, tick=self._grace.tick)
        except (OSError, CheckpointError, OutOfTime) as error:
            report(f"Rank {save.about.rank} could not flush step {step}: {error}")
            return False
        return True

    def _stand_in(self, step: int, token: str) -> None:
        """Write the parts of ranks whose writers are gone."""
        own = self._ranks.own
        if not self._sees_all:
            return
        try:
            present = own.storage.parts_present(step, token)
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
        """The leader's region, if this process may act for it."""
        held = {self._ranks.own.about.rank, *self._locks}
        saves = [self._ranks.saves[rank] for rank in held]
        return next((save for save in saves if save.about.is_leader), None)

    def _commit_newest(self, leader: RankSave, left: Set[Attempt]) -> int | None:
        """The newest step that was whole, and is committed now."""
        for step, token in sorted(left, reverse=True):
            try:
                if leader.is_whole(step, token):
                    leader.commit(step, token)
                    return step
            except (OSError, CheckpointError) as error:
                report(f"Step {step} could not be committed in {leader.storage.root}: {error}")
        return None

    def _stored_of(self, left: Set[Attempt]) -> int | None:
        """The newest step that is stored already, by whomever."""
        try:
            stored = set(self._ranks.own.storage.steps())
        except OSError:
            return None
        return max((step for step, _ in left if step in stored), default=None)
