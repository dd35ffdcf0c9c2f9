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

Where not all regions can be seen (several machines), there is nobody to agree with: each orphaned
writer writes all its complete snapshots that are newer than storage, newest first, and the leader
commits what becomes whole, until the newest has or the grace ends.

Invariant: a step is committed only from parts of one start of the run. Layer: above save.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.background.save import RankSave, attempt_token, report
from torchtitan_lite.checkpoint.memory.folder import regions_in
from torchtitan_lite.checkpoint.memory.lock import RankLock
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.storage.rate import TokenBucket
from torchtitan_lite.errors import CheckpointError

_POLL_S = 0.02
_RETRY_S = 0.5
_PREFIX = "flush-"
_ASKING = "leave-"


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


def published(ranks: Ranks) -> tuple[int, str] | None:
    """(step, token) that an orphaned writer decided on, if one has."""
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
    pending: dict[int, str],
    direct: bool,
    grace_s: float,
    others_s: float,
) -> list[int]:
    """Write what the death of this rank's trainer would lose, and return the steps committed here.

    `pending`: step -> token of the saves whose own part is written and that the leader has still
    to commit. Ends after `grace_s` at the latest, but for a write that is under way.
    """
    started = time.monotonic()
    deadline = started + grace_s
    ranks = Ranks(own)
    try:
        stored = _newest_stored(own)
        if ranks.look():
            decided = _decide(ranks, pending, started + others_s)
            wanted = {} if decided is None else {decided[0]: decided[1]}
        else:
            wanted = {step: _token(own, step, pending) for step in own.complete_slots()}
        wanted = {step: token for step, token in wanted.items() if step > stored}
        work = _Flush(ranks, direct=direct)
        for step, token in wanted.items():
            while not work.write(own, step, token) and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
        newest = max(wanted, default=None)
        # What was under way is older or the same, and still better than nothing.
        tokens = {**{s: token for s, token in pending.items() if s > stored}, **wanted}
        return work.commit_until(deadline, tokens, newest)
    finally:
        ranks.close()


def _token(own: RankSave, step: int, pending: dict[int, str]) -> str:
    """Of the attempt at a step that is under way, or of one without an order."""
    return pending.get(step) or attempt_token(own.about, 0)


def _newest_stored(own: RankSave) -> int:
    """The newest step on storage that this run may have saved; -1 for none, or when the storage
    does not say."""
    try:
        newest = max(own.complete_slots(), default=-1)
        # Later ones are damaged, or of a run that was taken back: they do not hold this state.
        return max((step for step in own.storage.steps() if step <= newest), default=-1)
    except OSError as error:
        report(f"The checkpoints in {own.storage.root} cannot be listed: {error}")
        return -1


def _decide(ranks: Ranks, pending: dict[int, str], deadline: float) -> tuple[int, str] | None:
    """(step, token) that all writers of this machine flush; None when no step is complete."""
    bound = max(ranks.own.complete_slots(), default=None)
    while True:
        decided = published(ranks)
        if decided is not None or bound is None:
            return decided
        step = ranks.common_step()
        is_late = time.monotonic() >= deadline
        if step is not None and (step == bound or is_late):
            _publish(ranks.decision_path(), step, _token(ranks.own, step, pending))
        elif is_late:
            return None
        else:
            time.sleep(_POLL_S)


def _publish(path: Path, step: int, token: str) -> None:
    """Publish a decision unless there is one: the link fails then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"step": step, "token": token}))
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


class _Flush:
    """Parts written for this rank and for ranks whose writers are gone."""

    def __init__(self, ranks: Ranks, *, direct: bool) -> None:
        self._ranks, self._direct = ranks, direct
        self._locks: dict[int, RankLock] = {}

    def write(self, save: RankSave, step: int, token: str) -> bool:
        """Write a rank's part, unless it is there. False, with a report, when that failed."""
        slot = save.complete_slots().get(step)
        try:
            if slot is None or save.about.rank in save.storage.parts_present(step, token):
                return True
            rate = TokenBucket(None)
            save.write(slot, step, token, direct=self._direct, rate=rate)
        except (OSError, CheckpointError) as error:
            report(f"Rank {save.about.rank} could not flush step {step}: {error}")
            return False
        return True

    def commit_until(
        self, deadline: float, tokens: dict[int, str], newest: int | None
    ) -> list[int]:
        """Commit what becomes whole. A writer that leads no rank ends once nobody needs it."""
        committed: list[int] = []
        left = dict(sorted(tokens.items(), reverse=True))
        try:
            while left:
                if newest is not None:
                    self._stand_in(newest, tokens[newest])
                leader = self._leader()
                if leader is None:
                    break
                for step in list(left):
                    if self._commit(leader, step, left[step]):
                        committed.append(step)
                        # Older ones would only delay the successor.
                        left = {s: a for s, a in left.items() if s > step}
                        break
                if time.monotonic() >= deadline:
                    break
                if left:
                    time.sleep(_POLL_S)
        finally:
            for lock in self._locks.values():
                lock.release()
        return committed

    def _stand_in(self, step: int, token: str) -> None:
        """Write the parts of ranks whose writers are gone."""
        own = self._ranks.own
        if len(self._ranks.saves) < own.about.world_size:
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
                self.write(save, step, token)

    def _leader(self) -> RankSave | None:
        """The leader's region, if this process may act for it."""
        held = {self._ranks.own.about.rank, *self._locks}
        saves = [self._ranks.saves[rank] for rank in held]
        return next((save for save in saves if save.about.is_leader), None)

    def _commit(self, leader: RankSave, step: int, token: str) -> bool:
        try:
            if not leader.is_whole(step, token):
                return False
            leader.commit(step, token)
        except (OSError, CheckpointError) as error:
            report(f"Step {step} could not be committed in {leader.storage.root}: {error}")
            return False
        return True
