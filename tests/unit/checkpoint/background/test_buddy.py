"""Copies of snapshots between two processes, as on two machines: real processes and sockets."""

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.harness.launch import wait_until
from tests.harness.snapshots import content, description, slot_bytes_of, snapshot
from tests.unit.fuzzing import FEW_OR_MANY, fuzz, json_objects
from torchtitan_lite.checkpoint.background import buddy
from torchtitan_lite.checkpoint.background.buddy import BuddySettings, CopyOrder, _Receiver
from torchtitan_lite.checkpoint.buddies import BuddyProcess
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    COPY,
    lock_run_folder,
    region_path,
    shared_memory_folder,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState
from torchtitan_lite.core.errors import DamagedSnapshot, RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.distributed.rpc.state_server import ServedState, StateServer

_SECRET = "a secret of one generation"
_LARGE = 600_000
"""Elements of the large tensor: 2.3 MiB, more than a second at the lowest rate."""


class Machine:
    """Region and process of one rank, whose buddy is the other rank."""

    def __init__(
        self, base: Path, rank: int, run_id: str, generation_id: str, listener: socket.socket
    ) -> None:
        self.rank, self.base, self.listener = rank, base, listener
        self.folder = shared_memory_folder(run_id, base=base)
        described = description(
            base / "checkpoint",
            rank,
            2,
            run_id=run_id,
            generation_id=generation_id,
            large_elements=_LARGE,
        )
        self.region = Region.create(self.folder, rank, described, slot_bytes_of(described))
        self.process: BuddyProcess | None = None

    def start(self, url: str, **changes: Any) -> BuddyProcess:
        """Start the process, which receives from `url`."""
        settings: dict[str, Any] = {
            "address": "127.0.0.1",
            "listener_fd": self.listener.fileno(),
            "secret": _SECRET,
            "purpose": "test",
            "sources": {1 - self.rank: url},
        }
        settings = settings | changes
        self.process = BuddyProcess(self.region.path, BuddySettings(**settings), self.listener)
        self.process.start()
        return self.process

    def order(self, number: int, step: int, slot: int = 0, **changes: Any) -> None:
        """Order a copy of a step in `slot`."""
        assert self.process is not None
        values = {"number": number, "slot": slot, "step": step, "segment": 0, "keep": None}
        self.process.copy(CopyOrder(**(values | changes)))

    def response(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Return the next response that ends a copy."""
        assert self.process is not None
        found: list[dict[str, Any]] = []

        def any_response() -> bool:
            some = self.process.responses() if self.process else []
            found.extend(one for one in some if "progress" not in one)
            return bool(found)

        wait_until(any_response, timeout_s)
        return found[0]

    def progress(self) -> set[int]:
        """Return the numbers of the copies that have advanced since the last call."""
        assert self.process is not None
        some = self.process.responses()
        assert all(one.keys() == {"progress", "source"} for one in some)
        return {one["progress"] for one in some}

    def copies(self) -> Region:
        """Return the copies on this machine."""
        return Region.open(region_path(self.folder, 1 - self.rank, COPY))


def _receiver(machine: Machine, **changes: Any) -> Any:
    """Return the receiver of a machine, without a process."""
    settings = BuddySettings(
        address="127.0.0.1",
        listener_fd=0,
        secret=_SECRET,
        purpose="test",
        sources={1 - machine.rank: "http://127.0.0.1:1"},
        **changes,
    )
    region = machine.region
    about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
    unused: Any = None
    return buddy._Receiver(1 - machine.rank, about, machine.folder, settings, unused)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    made = list(_machines(tmp_path, secrets.token_hex(16), "5e55"))
    yield made
    _close(made)


def _machines(base: Path, run_id: str, generation_id: str) -> Iterator[Machine]:
    for rank in range(2):
        listener = socket.create_server(("127.0.0.1", 0))
        (base / f"machine-{rank}").mkdir(exist_ok=True)
        yield Machine(base / f"machine-{rank}", rank, run_id, generation_id, listener)


def _close(machines: list[Machine]) -> None:
    for machine in machines:
        if machine.process is not None:
            machine.process.close()
        machine.listener.close()
        machine.region.close()


def start(machines: list[Machine], **changes: Any) -> None:
    urls = [f"http://127.0.0.1:{one.listener.getsockname()[1]}" for one in machines]
    for machine in machines:
        machine.start(urls[1 - machine.rank], **changes)


def holds(region: Region, rank: int, step: int) -> bool:
    """Return whether a region of copies has a rank's step, bitwise, with checksums."""
    slot = region.complete_slots().get(step)
    if slot is None:
        return False
    used = slot_bytes_of(region.description)
    assert region.digests(slot), "a complete copy has checksums"
    assert region.values(slot)["rng"] == {"rank": rank, "step": step}
    return bytes(region.data(slot)[:used]) == content(rank, step, used)


def test_copies_arrive_bitwise_with_values_and_checksums(machines: list[Machine]) -> None:
    start(machines)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        machine.order(1, 7)
    for machine in machines:
        assert machine.response() == {"received": 1, "source": 1 - machine.rank}
        copies = machine.copies()
        assert holds(copies, 1 - machine.rank, 7)
        copies.close()


def test_the_copy_to_keep_is_never_overwritten(machines: list[Machine]) -> None:
    start(machines)
    kept = None
    for number, step in enumerate((3, 6, 9, 12), 1):
        for machine in machines:
            snapshot(machine.region, 0, step)
            # As if the previous copy had not become complete on another rank.
            machine.order(number, step, keep=(0, 3) if number > 1 else None)
        for machine in machines:
            assert machine.response() == {"received": number, "source": 1 - machine.rank}
        copies = machines[0].copies()
        kept = sorted(copies.complete_slots())
        copies.close()
    assert kept == [3, 12]


def test_a_source_that_is_late_is_waited_for(machines: list[Machine]) -> None:
    start(machines)
    for machine in machines:
        snapshot(machine.region, 0, 7)
    machines[0].order(1, 7)
    time.sleep(0.3)
    machines[1].order(1, 7)
    assert machines[0].response() == {"received": 1, "source": 1}


def test_the_rate_is_limited(machines: list[Machine]) -> None:
    start(machines, bytes_per_s=1 << 20)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        machine.order(1, 7)
    started = time.monotonic()
    machines[0].response()
    # 2.3 MiB, of which the first quarter of a second is a burst.
    assert time.monotonic() - started > 1.5


def test_a_slot_that_changes_during_the_copy_is_not_taken(machines: list[Machine]) -> None:
    """The trainer keeps the slot, so this is a trainer that canceled the copy and went on."""
    start(machines, bytes_per_s=1 << 20, timeout_s=2.0)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        machine.order(1, 7)
    wait_until(lambda: region_path(machines[0].folder, 1, COPY).exists(), 30)
    time.sleep(0.3)
    snapshot(machines[1].region, 0, 8)
    response = machines[0].response()
    assert response["failed"] == 1 and "checksum" in response["error"]
    copies = machines[0].copies()
    assert not copies.complete_slots()
    copies.close()


def test_a_canceled_copy_stops_and_the_next_one_succeeds(machines: list[Machine]) -> None:
    start(machines, bytes_per_s=1 << 20)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        snapshot(machine.region, 1, 8)
        machine.order(1, 7)
    wait_until(lambda: region_path(machines[0].folder, 1, COPY).exists(), 30)
    for machine in machines:
        assert machine.process is not None
        machine.process.cancel()
        machine.order(2, 8, slot=1)
    assert machines[0].response() == {"received": 2, "source": 1}
    copies = machines[0].copies()
    assert list(copies.complete_slots()) == [8]
    copies.close()


@pytest.mark.parametrize("phase", ["chunks", "checksums", "end"])
def test_a_copy_ends_where_it_is_canceled(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(buddy, "_DIGEST_CHUNK_BYTES", 1 << 20)
    (own, other), order = machines, CopyOrder(1, 0, 7, 0, None)
    snapshot(other.region, 0, 7)
    served = buddy._served_snapshot(other.region, order, lambda: None)
    frame = b"".join(served.read(0, served.length))
    start = 8 + int.from_bytes(frame[:8], "little")
    receiver = _receiver(own)
    receiver._chunk_bytes = 1 << 20
    num_chunks = -(-(len(frame) - start) // (1 << 20))
    # The first step is the allocation.
    cancels_at = {"chunks": 2, "checksums": num_chunks + 2}.get(phase, 0)
    steps: list[str] = []

    def on_progress() -> None:
        steps.append("")
        if len(steps) == cancels_at:
            receiver.set_order(None)

    def check() -> None:
        if receiver._order is not order:
            raise buddy._Canceled

    class Connection:
        def fetch_range(self, start: int, into: Sequence[memoryview]) -> None:
            into[0][:] = frame[start : start + len(into[0])]

    def fill() -> None:
        connection: Any = Connection()
        receiver.set_order(order)
        receiver._fill(connection, frame[8:start], order, check, on_progress)

    if phase == "end":
        # In the last step of one that is not canceled.
        fill()
        assert holds(receiver._region, 1, 7)
        cancels_at, steps[:] = len(steps), []
    with pytest.raises(buddy._Canceled):
        fill()
    assert len(steps) == cancels_at
    assert len(receiver._region.complete_slots()) == (phase == "end")
    receiver._region.close()


def test_a_canceled_copy_does_not_fail(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = CopyOrder(1, 0, 7, 0, None)
    receiver = _receiver(machines[0], timeout_s=0.0)
    receiver.set_order(order)

    def fetch_header(*_: Any) -> bytes:
        receiver.set_order(None)
        raise RpcError("the source is gone", RpcStatus.UNAVAILABLE)

    monkeypatch.setattr(buddy.StateConnection, "fetch_header", fetch_header)
    with pytest.raises(buddy._Canceled):
        receiver._receive(order)


def test_a_source_killed_during_the_copy_serves_again_after_a_restart(
    machines: list[Machine],
) -> None:
    start(machines, bytes_per_s=1 << 20)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        machine.order(1, 7)
    wait_until(lambda: region_path(machines[0].folder, 1, COPY).exists(), 30)
    source = machines[1].process
    assert source is not None and source.pid is not None
    os.kill(source.pid, signal.SIGKILL)
    wait_until(lambda: not source.alive, 30)
    source.start()
    machines[1].order(1, 7)
    assert machines[0].response() == {"received": 1, "source": 1}
    copies = machines[0].copies()
    assert holds(copies, 1, 7)
    copies.close()


def test_a_source_that_is_gone_fails_the_copy_in_time(machines: list[Machine]) -> None:
    url = f"http://127.0.0.1:{machines[1].listener.getsockname()[1]}"
    machines[1].listener.close()
    machines[0].start(url, timeout_s=1.0)
    snapshot(machines[0].region, 0, 7)
    machines[0].order(1, 7)
    response = machines[0].response(10.0)
    assert response["failed"] == 1 and "cannot be read" in response["error"]


def test_another_step_or_generation_is_not_taken(machines: list[Machine]) -> None:
    start(machines)
    for machine in machines:
        snapshot(machine.region, 0, 7)
    machines[0].order(1, 7, segment=5)
    machines[1].order(1, 7)
    response = machines[0].response()
    assert response["failed"] == 1 and "is ordered" in response["error"]


def test_a_later_generation_keeps_the_copies_until_it_has_its_own(tmp_path: Path) -> None:
    run_id = secrets.token_hex(16)
    for generation_id, step in (("aa", 7), ("bb", 9)):
        machines = list(_machines(tmp_path, run_id, generation_id))
        start(machines)
        for machine in machines:
            snapshot(machine.region, 0, step)
            machine.order(1, step)
        assert machines[0].response() == {"received": 1, "source": 1}
        _close(machines)
    copies = machines[0].copies()
    assert (sorted(copies.complete_slots()), copies.generation_ids) == ([7, 9], ["bb", "aa"])
    copies.close()


def test_copies_are_allocated_under_the_lock_of_the_folder(machines: list[Machine]) -> None:
    start(machines)
    for machine in machines:
        snapshot(machine.region, 0, 7)
    with lock_run_folder(machines[0].folder):
        for machine in machines:
            machine.order(1, 7)
        # The other machine has received its copy.
        assert machines[1].response() == {"received": 1, "source": 0}
        machines[0].progress()
        # Waiting for the lock does not look like a copy that is stuck.
        wait_until(lambda: machines[0].progress() == {1}, 10)
        assert not region_path(machines[0].folder, 1, COPY).exists()
    assert machines[0].response() == {"received": 1, "source": 1}


def test_a_source_that_computes_checksums_is_waited_for_and_counts_as_progress(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tensor of 2.3 MiB takes longer than the timeout.
    monkeypatch.setattr(buddy, "_DIGEST_CHUNK_BYTES", 4096)
    source = machines[1]
    snapshot(source.region, 0, 7)
    server = SlowServer("127.0.0.1", _SECRET, "test", listener=source.listener.dup())
    worker = buddy._Source(source.region, server)
    worker.start()
    machines[0].start(server.url, timeout_s=3.0)
    order = CopyOrder(1, 0, 7, 0, None)
    worker.set_order(order)
    machines[0].order(1, 7)
    wait_until(lambda: machines[0].progress() == {1}, 10)
    wait_until(lambda: machines[0].progress() == {1}, 10)
    assert server.offered_s is None
    assert machines[0].response() == {"received": 1, "source": 1}
    assert server.offered_s is not None and server.offered_s > 3.5
    server.close()


class SlowServer(StateServer):
    """Server whose state takes a while to prepare."""

    offered_s: float | None = None
    """Time from the first progress until the state was offered."""
    _started_s: float | None = None

    def prepare(self, version: int, progress: int) -> None:
        self._started_s = self._started_s or time.monotonic()
        time.sleep(0.008)
        super().prepare(version, progress)

    def offer(self, version: int, state: ServedState, *, keep: Collection[int] = ()) -> None:
        assert self._started_s is not None
        self.offered_s = time.monotonic() - self._started_s
        super().offer(version, state, keep=keep)


def test_a_source_that_stops_preparing_is_not_waited_for(machines: list[Machine]) -> None:
    server = StateServer("127.0.0.1", _SECRET, "test", listener=machines[1].listener.dup())
    server.prepare(1, 5)
    machines[0].start(server.url, timeout_s=0.5)
    machines[0].order(1, 7)
    assert machines[0].response(10.0)["failed"] == 1
    server.close()


def test_checksums_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy, "_DIGEST_CHUNK_BYTES", 1000)
    ticks: list[int] = []
    for num_bytes, num_ticks in ((0, 0), (1, 1), (1000, 1), (2500, 3)):
        data = os.urandom(num_bytes)
        ticks.clear()
        digest = buddy._digest(memoryview(data), lambda: ticks.append(1))
        assert (digest, len(ticks)) == (xxhash.xxh3_64_hexdigest(data), num_ticks)


def test_a_stranger_reads_nothing(machines: list[Machine]) -> None:
    url = f"http://127.0.0.1:{machines[0].listener.getsockname()[1]}"
    start(machines)
    snapshot(machines[0].region, 0, 7)
    machines[0].order(1, 7)
    for secret, purpose in (("another secret of 20", "test"), (_SECRET, "another purpose")):
        connection = StateConnection(PeerEndpoint(url, secret, purpose, 5.0), 1)
        with pytest.raises(RpcError):
            connection.fetch_header()
        connection.close()


def test_without_its_trainer_the_process_ends(machines: list[Machine]) -> None:
    start(machines, bytes_per_s=1 << 20)
    for machine in machines:
        snapshot(machine.region, 0, 7)
        machine.order(1, 7)

    def states() -> list[SlotState]:
        # A region is damaged until it is created completely.
        with suppress(DamagedSnapshot), closing(machines[0].copies()) as copies:
            return [slot.state for slot in copies.slots()]
        return []

    wait_until(lambda: SlotState.COPYING in states(), 30)
    process = machines[0].process
    assert process is not None
    running = process._process
    assert running is not None and running.stdin is not None
    running.stdin.close()
    assert running.wait(10) == 0
    assert states() == [SlotState.COPYING, SlotState.EMPTY]


@FEW_OR_MANY
def test_an_arbitrary_header_fails_the_copy_only(num_examples: int, tmp_path: Path) -> None:
    right = description(tmp_path / "checkpoint", 0, 2, run_id="a" * 16, generation_id="b" * 16)
    content = {
        "description": right,
        "slot_bytes": slot_bytes_of(right),
        "values_bytes": 100,
        "step": 1,
        "segment": 0,
        "values": {},
        "digests": {},
    }
    assert buddy._Content(json.dumps(content).encode()).position == (0, 1)

    def check(changes: dict[str, Any], about: dict[str, Any]) -> None:
        described = {**content, "description": {**right, **about}}
        for header in ({**content, **changes}, described, changes, list(changes)):
            with suppress(*buddy._WRONG):
                buddy._Content(json.dumps(header).encode())

    fuzz(num_examples, check, changes=json_objects(*content), about=json_objects(*right))


def test_no_progress_is_reported_after_a_blocking_operation() -> None:
    receiver: Any = object.__new__(_Receiver)
    begun, may_end = threading.Event(), threading.Event()
    reports: list[object] = []

    def report(order: object) -> None:
        begun.set()
        may_end.wait(10)
        reports.append(order)

    threading.Thread.__init__(receiver, name="buddy")
    receiver._report_progress = report
    with receiver._blocked("order"):
        assert begun.wait(30)
        threading.Timer(0.2, may_end.set).start()
    assert reports == ["order"]
