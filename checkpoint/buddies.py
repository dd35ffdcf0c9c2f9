"""Buddy copies: each rank's snapshots are copied to a rank of the next machine, so that the state
survives the loss of a machine.

A copy is taken of one step on all ranks, and counts once all ranks have received theirs, which the
step's reduction tells. Until then the copies of the previous one stay, and so do the snapshots of
which they are copies, because a machine that is not lost contributes its own.

Invariant: copying never blocks training: orders are sent to a process, whose failures only cost a
copy. Layer: above save_context and background.
"""

import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.background.buddy import BuddySettings, CopyOrder
from torchtitan_lite.checkpoint.background.process import BackgroundProcess
from torchtitan_lite.checkpoint.collective import first_message
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.save_context import SaveContext
from torchtitan_lite.checkpoint.shared_memory.folder import (
    COPY,
    RankLock,
    machine_number,
    region_path,
)
from torchtitan_lite.host_collectives import all_gather_bytes, all_gather_ints, broadcast_bytes
from torchtitan_lite.log import logger
from torchtitan_lite.network import address_for_others
from torchtitan_lite.rpc.authentication import TOKEN

NUM_EXTRA_SLOTS = 2
"""Slots that copies add to a region: the snapshot being copied, and that of the newest copy."""
_MODULE = "torchtitan_lite.checkpoint.background.buddy"
_CLOSE_S = 5.0


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
    found = []
    for rank, machine in enumerate(machines):
        there = ranks[following[machine]]
        found.append(there[ranks[machine].index(rank) % len(there)])
    return found


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


def open_buddies(context: SaveContext, pairing: BuddyPairing, region: Path) -> "BuddyCopies | None":
    """Start the process that copies this rank's snapshots; None, with a warning, if that fails on
    any rank. Every rank must call it."""
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
    peers = [json.loads(one) for one in all_gather_bytes(json.dumps(about).encode())]
    # Known to this session's ranks only; with a token, also useless without that.
    secret = broadcast_bytes(secrets.token_hex(16).encode()).decode()
    problem = next((one["problem"] for one in peers if one["problem"]), "")
    found = None
    if not problem and listener is not None:
        config, identity = context.config, context.identity
        settings = BuddySettings(
            address=address,
            listener_fd=listener.fileno(),
            secret=secret + os.environ.get(TOKEN, ""),
            purpose=f"buddies {identity.run_id} {identity.session}",
            sources={rank: peers[rank]["url"] for rank in pairing.sources},
            bytes_per_s=config.buddy_mib_per_s * 2**20,
            nice=config.writer_nice,
        )
        found = BuddyCopies(context, BuddyProcess(region, settings, listener), pairing.sources)
        try:
            found.start()
        except OSError as error:
            problem = f"rank {context.mesh.rank} cannot start a process: {error}"
    problem = first_message(problem)
    if not problem:
        return found
    if found is not None:
        found.close(free=False)
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
    restarts: int = 0
    failed: bool = False


@dataclass(frozen=True)
class _Kept:
    """A snapshot of which there are copies."""

    slot: int
    position: tuple[int, int]
    """Its segment and step."""


@dataclass
class CopySignals:
    """State of the copy in progress on one rank, or of all ranks after summation."""

    pending: float = 0.0
    """Nonzero if this rank has not received everything."""
    failed: float = 0.0
    """Nonzero if this rank's part failed."""


class BuddyCopies:
    """Orders the copies of one rank's snapshots. All ranks take the same decisions, because they
    follow from the step and from the summed signals."""

    def __init__(self, context: SaveContext, process: BuddyProcess, sources: Sequence[int]) -> None:
        """Use `open_buddies` instead. `sources`: ranks whose buddy this rank is."""
        self._context, self.process, self._sources = context, process, frozenset(sources)
        self._copy: _Copy | None = None
        self._number = 0
        self._begun_at: int | None = None
        """Step of the newest copy that was begun."""
        self._kept: _Kept | None = None
        self._has_copied = False

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
        return CopySignals(float(copy.pid is None or bool(copy.missing)), float(copy.failed))

    def apply(self, all_ranks: CopySignals) -> None:
        """Act on the signals summed over all ranks."""
        copy = self._copy
        if copy is None:
            return
        if all_ranks.failed > 0:
            self.cancel()
        elif all_ranks.pending == 0:
            order, self._copy = copy.order, None
            if not self._has_copied and self._context.mesh.is_leader:
                logger.info("Step %d is copied to the memory of other machines.", order.step)
            self._has_copied = True
            self._kept = _Kept(order.slot, (order.segment, order.step))

    def cancel(self) -> None:
        """Drop the copy in progress."""
        if self._copy is not None:
            self._copy = None
            self.process.cancel()

    def resume_from(self, slot: int | None, origin: SnapshotOrigin | None) -> None:
        """Resume from `origin`, whose snapshot is in `slot`; None if it is not in this region. Of
        the earlier copies only those of that step, if there are any, are useful now."""
        self.cancel()
        self._begun_at = self._kept = None
        if slot is not None and origin is not None:
            self._kept = _Kept(slot, (origin.segment, origin.step))

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
                copy.failed = True
                return
            copy.restarts += 1
            logger.warning("The process that copies snapshots has died. It is started again.")
            try:
                self.process.start()
            except OSError as error:
                logger.error("The process that copies snapshots cannot be started: %s", error)
                copy.failed = True
                return
        copy.missing = set(self._sources)
        self.process.copy(copy.order)
        copy.pid = self.process.pid

    def _handle(self, response: dict[str, object]) -> None:
        copy = self._copy
        if copy is None or copy.pid is None:
            return
        if response.get("received") == copy.order.number:
            copy.missing.discard(int(str(response["source"])))
        elif response.get("failed") == copy.order.number:
            copy.failed = True
            logger.error(
                "Step %d of rank %s was not copied to this machine: %s The next copy is due after "
                "checkpoint.buddy_interval = %d steps.",
                copy.order.step,
                response["source"],
                response["error"],
                self._context.config.buddy_interval,
            )
