"""Buddy copies: each rank's snapshots are copied to a rank of the next machine, so that the state
survives the loss of a machine.

A copy is taken of one step on all ranks, and counts once all ranks have received theirs, which the
step's reduction tells. Until then the copies of the previous one stay, and so do the snapshots of
which they are copies, because a machine that is not lost contributes its own.

Invariant: copying never blocks training: orders are sent to a process, whose failures only cost a
copy.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.checkpoint.background.buddy import BuddySettings, CopyOrder
from torchtitan_lite.checkpoint.background.process import BackgroundProcess
from torchtitan_lite.checkpoint.history.snapshot_index import Position
from torchtitan_lite.checkpoint.save_context import SaveContext
from torchtitan_lite.checkpoint.shared_memory.folder import (
    COPY,
    RankLock,
    machine_number,
    region_path,
)
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.host_collectives import (
    all_gather_bytes,
    all_gather_ints,
    broadcast_bytes,
)
from torchtitan_lite.distributed.network import address_for_others
from torchtitan_lite.distributed.on_all_ranks import first_message
from torchtitan_lite.distributed.rpc.authentication import TOKEN

NUM_EXTRA_SLOTS = 2
"""Slots that copies add to a region: the snapshot being copied, and that of the newest copy."""
_MODULE = "torchtitan_lite.checkpoint.background.buddy"
_CLOSE_S = 5.0
_STUCK_S = 40.0
"""Time without progress after which a copy is reported; longer than that after which the process
itself reports a failure, if it can."""


def buddies_of(machines: Sequence[int]) -> list[int] | None:
    """Return the buddy of each rank, given the machine of each: the rank with the same local index
    on the next machine, or, if that has fewer ranks, with the index modulo their number. None if
    there is only one machine."""
    ranks: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    if len(ranks) < 2:
        return None
    # In the order of their first ranks.
    order = list(ranks)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    buddies = []
    for rank, machine in enumerate(machines):
        there = ranks[following[machine]]
        buddies.append(there[ranks[machine].index(rank) % len(there)])
    return buddies


@dataclass(frozen=True)
class BuddyPairing:
    """Which snapshots are copied to this machine."""

    sources: tuple[int, ...]
    """Ranks whose buddy this rank is."""
    sources_here: frozenset[int]
    """Ranks whose buddy is any rank of this machine."""


def pair_buddies(context: SaveContext) -> BuddyPairing | None:
    """Return this rank's pairing; None if `buddy_interval` is 0, or, with a warning, if there is
    only one machine. Every rank must call it."""
    interval, mesh = context.config.buddy_interval, context.mesh
    if interval == 0:
        return None
    machines = all_gather_ints(machine_number())
    buddies = buddies_of(machines)
    if buddies is None:
        if mesh.is_leader:
            logger.warning(
                "checkpoint.buddy_interval = %d has no effect: all %d ranks run on one machine, so "
                "there is no other to copy snapshots to. Start ranks on two machines, or set it "
                "to 0.",
                interval,
                mesh.world_size,
            )
        return None
    return BuddyPairing(
        tuple(rank for rank, buddy in enumerate(buddies) if buddy == mesh.rank),
        frozenset(
            rank for rank, buddy in enumerate(buddies) if machines[buddy] == machines[mesh.rank]
        ),
    )


def open_buddies(
    context: SaveContext, pairing: BuddyPairing, region: Path, resumed_generation_id: str | None
) -> "BuddyCopies | None":
    """Start the process that copies this rank's snapshots; None, with a warning, if that fails on
    any rank. Copies of `resumed_generation_id` are taken over. Every rank must call it."""
    listener: socket.socket | None = None
    about = {"url": "", "problem": ""}
    address = ""
    try:
        address = address_for_others(
            os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
        )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        host = f"[{address}]" if ":" in address else address
        about["url"] = f"http://{host}:{listener.getsockname()[1]}"
    except (OSError, ValueError) as error:
        about["problem"] = f"rank {context.mesh.rank} cannot listen: {error!r}"
    peers = [json.loads(text) for text in all_gather_bytes(json.dumps(about).encode())]
    # Known to this generation's ranks only; with a token, also useless without that.
    secret = broadcast_bytes(secrets.token_hex(16).encode()).decode()
    problem = next((peer["problem"] for peer in peers if peer["problem"]), "")
    copies = None
    if not problem and listener is not None:
        config, identity = context.config, context.identity
        settings = BuddySettings(
            address=address,
            listener_fd=listener.fileno(),
            secret=secret + os.environ.get(TOKEN, ""),
            purpose=f"buddies {identity.run_id} {identity.generation_id}",
            sources={rank: peers[rank]["url"] for rank in pairing.sources},
            bytes_per_s=config.buddy_mib_per_s * 2**20,
            nice=config.writer_nice,
            resumed_generation_id=resumed_generation_id,
        )
        copies = BuddyCopies(context, BuddyProcess(region, settings, listener))
        try:
            copies.start()
        except OSError as error:
            problem = f"rank {context.mesh.rank} cannot start a process: {error}"
    problem = first_message(problem)
    if not problem:
        return copies
    if copies is not None:
        copies.close(free=False)
    elif listener is not None:
        listener.close()
    if context.mesh.is_leader:
        logger.warning("Snapshots are not copied to other machines: %s", problem)
    return None


class BuddyProcess(BackgroundProcess):
    """Process that serves a rank's snapshots, and receives those of others."""

    def __init__(self, region: Path, settings: BuddySettings, listener: socket.socket) -> None:
        """`listener` is kept open, so that the address outlives the process."""
        super().__init__([sys.executable, "-m", _MODULE, str(region)], settings.to_json())
        self.settings = settings
        self.folder = region.parent
        """Folder of the run in shared memory."""
        self._inherited = (listener.detach(),)

    def copy(self, order: CopyOrder) -> None:
        """Order a copy, which replaces any other."""
        self._send({"copy": order.to_json()})

    def cancel(self) -> None:
        """Cancel the copy in progress."""
        self._send({"cancel": True})


@dataclass
class _Copy:
    """A copy in progress."""

    order: CopyOrder
    missing: set[int]
    """Sources that this rank has not received yet."""
    pid: int | None = None
    """Process that has the order; None before it is sent."""
    begun_s: float = field(default_factory=time.monotonic)
    progress_s: dict[int, float] = field(default_factory=dict)
    """Source -> time of its last sign of progress, or of the order."""
    restarts: int = 0
    error: str = ""
    """Why this rank's part failed, as a sentence."""


@dataclass(frozen=True)
class _Kept:
    """A snapshot of which there are copies."""

    slot: int | None
    """None if this rank does not have it itself."""
    position: tuple[int, int]
    """Its segment and step."""
    taken_s: float | None
    """None if another process took it."""


@dataclass
class CopySignals:
    """State of the copy in progress on one rank, or of all ranks after summation."""

    pending: float = 0.0
    """Nonzero if this rank has not received everything."""
    failed: float = 0.0
    """Nonzero if this rank's part failed."""
    stuck: float = 0.0
    """Nonzero if this rank receives nothing."""


class BuddyCopies:
    """Orders the copies of one rank's snapshots. All ranks take the same decisions, because they
    follow from the step and from the summed signals."""

    def __init__(self, context: SaveContext, process: BuddyProcess) -> None:
        """Use `open_buddies` instead."""
        self._context, self.process = context, process
        self._sources = frozenset(process.settings.sources)
        """Ranks whose buddy this rank is."""
        self._copy: _Copy | None = None
        self._number = 0
        self._begun_at: int | None = None
        """Step of the newest copy that was begun."""
        self._kept: _Kept | None = None
        self._has_copied = False
        self._failing_since_s: float | None = None
        """Start time of the first of the consecutive failed copies."""
        self._events: list[StepEvent] = []

    def start(self) -> None:
        """Start the process. Raises OSError."""
        self.process.start()

    @property
    def copied_step(self) -> int | None:
        """Newest step that all ranks have copied; the one that the run resumed from before."""
        return None if self._kept is None else self._kept.position[1]

    @property
    def slots(self) -> set[int | None]:
        """Slots that must not be overwritten."""
        return {self._copy and self._copy.order.slot, self._kept and self._kept.slot}

    def is_due(self, step: int) -> bool:
        """Return whether a copy of `step` is due: `buddy_interval` steps after the previous one
        began, and not before it is complete."""
        if self._copy is not None:
            return False
        interval = self._context.config.buddy_interval
        return self._begun_at is None or step >= self._begun_at + interval

    def begin(self, slot: int, step: int) -> None:
        """Copy the snapshot of `step`, which is being filled into `slot`."""
        self._number += 1
        self._begun_at = step
        keep = self._kept and self._kept.position
        order = CopyOrder(self._number, slot, step, self._context.lineage.segment, keep)
        self._copy = _Copy(order, set(self._sources))

    def signals(self) -> CopySignals:
        """Send the order once, read responses, and return this rank's signals. The snapshot must be
        complete."""
        for response in self.process.responses():
            self._handle(response)
        copy = self._copy
        if copy is None:
            return CopySignals()
        if copy.pid is None or not self.process.alive:
            self._send(copy)
        return CopySignals(
            pending=float(copy.pid is None or bool(copy.missing)),
            failed=float(bool(copy.error)),
            stuck=float(_is_stuck(copy)),
        )

    def apply(self, all_ranks: CopySignals) -> bool:
        """Act on the signals summed over all ranks, and return whether a copy became complete.
        Every rank must call it."""
        copy = self._copy
        if copy is None:
            return False
        if all_ranks.failed > 0 or all_ranks.stuck > 0:
            self._report_failure(copy)
        if all_ranks.failed > 0:
            self.cancel()
            return False
        if all_ranks.pending > 0:
            return False
        order, self._copy = copy.order, None
        if not self._has_copied and self._context.mesh.is_leader:
            logger.info("Step %d is copied to the memory of other machines.", order.step)
        self._has_copied = True
        self._kept = _Kept(order.slot, (order.segment, order.step), copy.begun_s)
        self._report_success(order.step)
        return True

    def events(self) -> list[StepEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _report_failure(self, copy: _Copy) -> None:
        """Report the first of consecutive failures. Every rank must call it."""
        if self._failing_since_s is not None:
            return
        self._failing_since_s = copy.begun_s
        reason = first_message(self._reason(copy))
        kept = self._kept
        age_s = None if kept is None or kept.taken_s is None else time.monotonic() - kept.taken_s
        if kept is None:
            newest = "There is no earlier copy"
        elif age_s is None:
            newest = f"The newest copy is of step {kept.position[1]}, from before this start"
        else:
            newest = f"The newest copy is of step {kept.position[1]}, taken {age_s:.0f} s ago"
        if self._context.mesh.is_leader:
            logger.warning(
                "Step %d is not copied to another machine: %s %s; the loss of a machine would cost "
                "the steps since then. The next copy is due checkpoint.buddy_interval = %d steps "
                "after this one.",
                copy.order.step,
                reason,
                newest,
                self._context.config.buddy_interval,
            )
        values = {"reason": reason, "copied_step": self.copied_step, "copy_age_s": age_s}
        self._events.append(StepEvent("buddy_copies_failed", values))

    def _reason(self, copy: _Copy) -> str:
        """Return why this rank's part of a copy failed or is stuck; "" if neither."""
        if copy.error:
            return copy.error
        if not _is_stuck(copy):
            return ""
        source = min(copy.missing, key=copy.progress_s.__getitem__)
        silent_s = time.monotonic() - copy.progress_s[source]
        silence = f"nothing from {self.process.settings.sources[source]} for {silent_s:.0f} s."
        return f"{self._this_rank}, the buddy of rank {source}, has received {silence}"

    @property
    def _this_rank(self) -> str:
        return f"Rank {self._context.mesh.rank} at {self.process.settings.address}"

    def _report_success(self, step: int) -> None:
        """Report the end of consecutive failures."""
        if self._failing_since_s is None:
            return
        outage_s = time.monotonic() - self._failing_since_s
        self._failing_since_s = None
        if self._context.mesh.is_leader:
            logger.info(
                "Step %d is copied to another machine, after %.0f s without a copy.", step, outage_s
            )
        values = {"copied_step": step, "outage_s": outage_s}
        self._events.append(StepEvent("buddy_copies_recovered", values))

    def cancel(self) -> None:
        """Drop the copy in progress."""
        if self._copy is not None:
            self._copy = None
            self.process.cancel()

    def resume_from(self, slot: int | None, position: Position | None) -> None:
        """Of the earlier copies keep those of `position`, which this rank has in `slot`, if it has
        it, until a newer one is complete."""
        self.cancel()
        self._begun_at = self._kept = None
        if position is not None:
            self._kept = _Kept(slot, position, taken_s=None)

    def close(self, *, free: bool) -> None:
        """End the process. `free`: the state is durable, so the copies are removed."""
        if not free:
            self.process.detach()
            return
        self.process.close(timeout_s=_CLOSE_S)
        for source in self._sources:
            for path in (
                region_path(self.process.folder, source, COPY),
                RankLock(self.process.folder, source, COPY).path,
            ):
                path.unlink(missing_ok=True)

    def _send(self, copy: _Copy) -> None:
        """Send the order to the process, and again to its successor if it has died."""
        if not self.process.alive:
            if copy.restarts:
                copy.error = f"{self._this_rank}: the process that copies snapshots died twice."
                return
            copy.restarts += 1
            logger.warning("The process that copies snapshots has died. It is started again.")
            try:
                self.process.start()
            except OSError as error:
                copy.error = (
                    f"{self._this_rank}: the process that copies snapshots cannot be started: "
                    f"{error}."
                )
                return
        copy.missing = set(self._sources)
        self.process.copy(copy.order)
        copy.pid = self.process.pid
        copy.progress_s = dict.fromkeys(copy.missing, time.monotonic())

    def _handle(self, response: dict[str, object]) -> None:
        copy = self._copy
        if copy is None or copy.pid is None:
            return
        kind = next((name for name in ("progress", "received", "failed") if name in response), "")
        if not kind or response[kind] != copy.order.number:
            # Of a copy that was canceled.
            return
        source = int(str(response["source"]))
        copy.progress_s[source] = time.monotonic()
        if kind == "received":
            copy.missing.discard(source)
        elif kind == "failed":
            copy.error = f"{self._this_rank}, the buddy of rank {source}: {response['error']}"


def _is_stuck(copy: _Copy) -> bool:
    """Return whether a source from which this rank copies has made no progress for too long."""
    since_s = time.monotonic() - _STUCK_S
    return copy.pid is not None and any(copy.progress_s[rank] <= since_s for rank in copy.missing)
