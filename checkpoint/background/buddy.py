"""`python -m torchtitan_lite.checkpoint.background.buddy REGION`: copy snapshots between machines.

The process of each rank serves the rank's own snapshots, and fetches those of the ranks whose buddy
it is into shared memory of this machine. It is not the checkpoint writer, so that slow storage does
not delay copies, and copies do not delay saves.

The first line of standard input holds the settings. One order per line follows, as JSON: {"copy":
{"number": c, "slot": k, "step": n, "segment": s, "keep": [s, n] or null}}, {"cancel": true}, or
{"stop": true}. All ranks get the same copies, by consecutive numbers. Responses: {"progress": c,
"source": rank} while the copy advances, {"received": c, "source": rank}, or {"failed": c,
"source": rank, "error": text}. The end of input ends the process.

Invariants: a copy is complete only if all its checksums match those that the source computed; one
thread alone writes to the copies of a rank, and never to the slot of the copy to `keep`; an order
never waits for a transfer.
"""

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.background.channel import (
    WriterChannel,
    ignore_stop_signals,
    own_output,
)
from torchtitan_lite.checkpoint.background.save import log_to_stderr
from torchtitan_lite.checkpoint.background.writer import lower_priority
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import COPY, RankLock, lock_run_folder
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotHeader, SlotState
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket
from torchtitan_lite.core.errors import CheckpointError, DamagedSnapshot, RpcError
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.distributed.rpc.state_server import FramedState, StateServer

NUM_COPIES = 2
"""Slots per copied rank: the newest copy that all ranks have, and the one being received."""
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 64 << 10, 4 << 20
_CHUNKS_PER_S = 8
_RETRY_S = 0.5
_PROGRESS_S = 1.0
_DIGEST_CHUNK_BYTES = 64 << 20
"""Bytes hashed between two signs of progress."""
_MAX_BLOCKED_S = 300.0
"""Time for which waiting for locks and allocating memory count as progress."""
_WRONG = (CheckpointError, RpcError, OSError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class BuddySettings:
    """Settings of the process, sent as one line of JSON."""

    address: str
    """Address at which the snapshots are served."""
    listener_fd: int
    """Descriptor of the socket that listens there."""
    secret: str
    purpose: str
    sources: Mapping[int, str] = field(default_factory=dict)
    """Rank whose snapshots are copied here -> URL."""
    bytes_per_s: float | None = None
    """Maximum rate of each copy; None for no limit."""
    timeout_s: float = 30.0
    """Time without progress after which a copy fails."""
    resumed_generation_id: str | None = None
    """Generation whose copies are taken over and kept until there is a newer one."""
    nice: int = 10
    """Increment of the process's niceness."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BuddySettings":
        """Parse the form of `to_json`. Raises TypeError or ValueError."""
        sources = {int(rank): str(url) for rank, url in values["sources"].items()}
        return cls(**{**values, "sources": sources})


@dataclass(frozen=True)
class CopyOrder:
    """An order to copy one step."""

    number: int
    slot: int
    """Slot of this rank's own snapshot."""
    step: int
    segment: int
    keep: tuple[int, int] | None
    """Segment and step of the newest copy that all ranks have, which must not be overwritten."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CopyOrder":
        """Parse an order."""
        keep = values["keep"]
        kept = None if keep is None else (int(keep[0]), int(keep[1]))
        return cls(values["number"], values["slot"], values["step"], values["segment"], kept)

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON values."""
        return asdict(self)


class _Canceled(Exception):
    """The order was canceled, or a newer one arrived."""


def _served_snapshot(region: Region, order: CopyOrder, tick: Callable[[], None]) -> FramedState:
    """Read a slot as it is served (description, values and checksums, then its data), and compute
    its checksums. `tick` is called regularly, and may raise. Raises CheckpointError if the slot
    does not hold the ordered step during that time."""
    _require(region, order)
    about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
    data = region.data(order.slot)
    digests = {
        held.name: _digest(data[held.offset : held.offset + held.bytes], tick)
        for held in about.tensors
    }
    content = {
        "description": region.description,
        "slot_bytes": region.slot_bytes,
        "values_bytes": region.values_bytes,
        "step": order.step,
        "segment": order.segment,
        "values": region.values(order.slot),
        "digests": digests,
    }
    _require(region, order)
    encoded = json.dumps(content).encode()
    return FramedState(encoded, data[: _used_bytes(about)])


class _Worker(threading.Thread):
    """Carries out the newest copy order."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._order: CopyOrder | None = None
        self._changed = threading.Condition()

    def set_order(self, order: CopyOrder | None) -> None:
        """Carry out this order instead of any other, or nothing."""
        with self._changed:
            self._order = order
            self._changed.notify()

    def run(self) -> None:
        done: CopyOrder | None = None
        while True:
            with self._changed:
                while self._order is None or self._order is done:
                    self._changed.wait()
                order = done = self._order
            self._carry_out(order)

    def _carry_out(self, order: CopyOrder) -> None:
        raise NotImplementedError


class _Source(_Worker):
    """Computes checksums of ordered snapshots and offers them."""

    def __init__(self, region: Region, server: StateServer) -> None:
        super().__init__("source")
        self._region, self._server = region, server

    def set_order(self, order: CopyOrder | None) -> None:
        with self._changed:
            self._server.withdraw()
            super().set_order(order)

    def _carry_out(self, order: CopyOrder) -> None:
        progress = itertools.count(1)

        def tick() -> None:
            with self._changed:
                if self._order is not order:
                    raise _Canceled
                self._server.prepare(order.number, next(progress))

        try:
            served = _served_snapshot(self._region, order, tick)
        except _Canceled:
            return
        except CheckpointError as error:
            # The receivers time out, and report it.
            log_to_stderr(f"Step {order.step} cannot be copied: {error}")
            return
        with self._changed:
            if self._order is order:
                self._server.offer(order.number, served)


class _Receiver(_Worker):
    """Receives the snapshots of one rank."""

    def __init__(
        self, source: int, own: RegionDescription, folder: Path, settings: BuddySettings,
        channel: WriterChannel,
    ) -> None:  # fmt: skip
        super().__init__(f"receiver-{source}")
        self._source, self._own, self._folder = source, own, folder
        self._settings, self._channel = settings, channel
        self._endpoint = PeerEndpoint(
            settings.sources[source], settings.secret, settings.purpose, settings.timeout_s
        )
        self._rate = TokenBucket(settings.bytes_per_s)
        per_s = settings.bytes_per_s or _CHUNKS_PER_S * _MAX_CHUNK_BYTES
        # Small at a low rate, because the source closes idle connections.
        self._chunk_bytes = int(min(max(per_s / _CHUNKS_PER_S, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))
        self._lock = RankLock(folder, source, COPY)
        self._region: Region | None = None
        self._reported_s = 0.0
        """Time of the last report of progress."""

    def _carry_out(self, order: CopyOrder) -> None:
        try:
            self._receive(order)
        except _Canceled:
            return
        except _WRONG as error:
            text = f"{type(error).__name__}: {error}"
            self._channel.send(failed=order.number, source=self._source, error=text)
        else:
            self._channel.send(received=order.number, source=self._source)

    def _receive(self, order: CopyOrder) -> None:
        """Receive a step. Raises _Canceled, and what `_WRONG` lists."""
        deadline = _Deadline(self._settings.timeout_s)

        def check() -> None:
            if self._order is not order:
                raise _Canceled

        def on_progress() -> None:
            deadline.extend()
            self._report_progress(order)

        while True:
            connection = StateConnection(self._endpoint, order.number)
            try:
                header = connection.fetch_header(check, on_progress)
                self._fill(connection, header, order, check, on_progress)
                return
            except RpcError:
                # The source's process may have been restarted.
                check()
                if deadline.is_over:
                    raise
                time.sleep(_RETRY_S)
            finally:
                connection.close()

    def _fill(
        self, connection: StateConnection, header: bytes, order: CopyOrder,
        check: Callable[[], None], on_progress: Callable[[], None],
    ) -> None:  # fmt: skip
        content = _Content(header)
        self._check_origin(content, order)
        with self._blocked(order):
            region = self._open(content)
        on_progress()
        slot = _free_slot(region, order.keep)
        region.begin(slot, order.step)
        data = region.data(slot)
        start = 8 + len(header)
        for first in range(0, content.used_bytes, self._chunk_bytes):
            check()
            view = data[first : min(first + self._chunk_bytes, content.used_bytes)]
            connection.fetch_range(start + first, [view])
            on_progress()
            self._rate.spend(len(view), check)

        def tick() -> None:
            check()
            on_progress()

        for held in content.about.tensors:
            part = data[held.offset : held.offset + held.bytes]
            if _digest(part, tick) != content.digests[held.name]:
                raise CheckpointError(
                    f"The copy of step {order.step} of rank {self._source} is damaged: the "
                    f"checksum of {held.name} does not match."
                )
        check()
        region.complete(slot, content.values)
        region.store_digests(slot, content.digests)

    def _report_progress(self, order: CopyOrder) -> None:
        """Report progress to the trainer, at most once per `_PROGRESS_S`."""
        if time.monotonic() >= self._reported_s + _PROGRESS_S:
            self._reported_s = time.monotonic()
            self._channel.send(progress=order.number, source=self._source)

    @contextmanager
    def _blocked(self, order: CopyOrder) -> Iterator[None]:
        """Report progress while the thread waits for locks and allocates memory in the kernel."""
        ended = threading.Event()

        def report() -> None:
            until = time.monotonic() + _MAX_BLOCKED_S
            while not ended.wait(_PROGRESS_S) and time.monotonic() < until:
                self._report_progress(order)

        reporter = threading.Thread(target=report, name=f"{self.name}-blocked", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _check_origin(self, content: "_Content", order: CopyOrder) -> None:
        about, own = content.about, self._own
        served = (about.run_id, about.generation_id, about.rank, about.world_size, content.position)
        wanted = (
            own.run_id, own.generation_id, self._source, own.world_size, (order.segment, order.step)
        )  # fmt: skip
        if served != wanted:
            raise CheckpointError(
                f"Rank {self._source} serves {served}, but {wanted} is ordered (run, generation, "
                "rank, number of ranks, segment and step)."
            )

    def _open(self, content: "_Content") -> Region:
        """Return the region of the copies; take over that of an earlier generation."""
        if self._region is not None:
            return self._region
        # The process of an earlier generation may still be ending.
        if not self._lock.acquire(self._settings.timeout_s):
            raise CheckpointError(f"Process {self._lock.owner()} holds {self._lock.path}.")
        description, slot_bytes = content.description, content.slot_bytes
        values_bytes = content.values_bytes + len(json.dumps(content.digests))
        rank = self._source
        self._region = Region.adopt(
            self._folder, rank, description, slot_bytes, num_slots=NUM_COPIES, kind=COPY,
            values_bytes=values_bytes, generation_id=self._settings.resumed_generation_id,
        )  # fmt: skip
        if self._region is None:
            # Serialized with the ranks and the other copies, so that each sees what those before it
            # have allocated.
            with lock_run_folder(self._folder):
                self._region = Region.create(
                    self._folder, rank, description, slot_bytes,
                    num_slots=NUM_COPIES, values_bytes=values_bytes, kind=COPY,
                )  # fmt: skip
        return self._region


class _Content:
    """A parsed header. Raises ValueError, LookupError, TypeError or DamagedSnapshot."""

    def __init__(self, header: bytes) -> None:
        parsed = json.loads(header)
        self.slot_bytes, self.values_bytes = int(parsed["slot_bytes"]), int(parsed["values_bytes"])
        self.description = parsed["description"]
        self.about = RegionDescription.from_dict(self.description, slot_bytes=self.slot_bytes)
        self.position = (int(parsed["segment"]), int(parsed["step"]))
        self.values: dict[str, Any] = parsed["values"]
        self.digests: dict[str, str] = parsed["digests"]
        self.used_bytes = _used_bytes(self.about)


class _Deadline:
    """Time by which there must be progress."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.extend()

    def extend(self) -> None:
        self._until = time.monotonic() + self._timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until


def _digest(data: memoryview, tick: Callable[[], None]) -> str:
    """Return the checksum of `data`; `tick` is called after each chunk, and may raise."""
    checksum = xxhash.xxh3_64()
    for first in range(0, len(data), _DIGEST_CHUNK_BYTES):
        checksum.update(data[first : first + _DIGEST_CHUNK_BYTES])
        tick()
    return checksum.hexdigest()


def _used_bytes(about: RegionDescription) -> int:
    return max((held.offset + held.bytes for held in about.tensors), default=0)


def _require(region: Region, order: CopyOrder) -> None:
    held = region.slots()[order.slot]
    if held != SlotHeader(order.step, SlotState.COMPLETE):
        raise CheckpointError(f"Slot {order.slot} of {region.path} holds {held} now.")


def _free_slot(region: Region, keep: tuple[int, int] | None) -> int:
    """Return the slot to overwrite: an incomplete one, or else the oldest, but not that of
    `keep`."""

    def position(slot: int) -> tuple[int, int]:
        try:
            segment = int(region.values(slot).get("segment", 0))
        except (DamagedSnapshot, TypeError, ValueError):
            return (-1, -1)
        return (segment, region.slots()[slot].step)

    positions = {slot: position(slot) for slot in range(region.num_slots)}
    return min((slot for slot in positions if positions[slot] != keep), key=positions.__getitem__)


def main(region_path: str) -> int:
    """Run until the trainer ends, and return the exit status."""
    ignore_stop_signals()
    channel = WriterChannel(outgoing=own_output())
    initial = channel.next_order()
    if initial is None:
        return 0
    try:
        settings = BuddySettings.from_json(initial)
        lower_priority(settings.nice, io_idle=False)
        region = Region.open(Path(region_path))
        own = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
        server = StateServer(
            settings.address,
            settings.secret,
            settings.purpose,
            listener=socket.socket(fileno=settings.listener_fd),
        )
        workers: list[_Worker] = [_Source(region, server)]
        for source in settings.sources:
            workers.append(_Receiver(source, own, region.path.parent, settings, channel))
    except _WRONG as error:
        log_to_stderr(f"Snapshots are not copied: {type(error).__name__}: {error}")
        return 1
    for worker in workers:
        worker.start()
    while (order := channel.next_order()) is not None and "stop" not in order:
        copy = CopyOrder.from_json(order["copy"]) if "copy" in order else None
        for worker in workers:
            worker.set_order(copy)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
