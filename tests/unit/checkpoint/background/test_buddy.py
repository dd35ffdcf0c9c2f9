"""Copies of snapshots between two processes, as on two machines: real processes and sockets."""

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import wait_until
from tests.snapshots import content, description, slot_bytes_of, snapshot
from torchtitan_lite.checkpoint.background.buddy import BuddySettings, CopyOrder
from torchtitan_lite.checkpoint.buddies import BuddyProcess
from torchtitan_lite.checkpoint.shared_memory.folder import COPY, region_path, run_folder
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState
from torchtitan_lite.errors import RpcError
from torchtitan_lite.rpc.state_client import PeerEndpoint, StateConnection

_SECRET = "a secret of one session"
_LARGE = 600_000
"""Elements of the large tensor: 2.3 MiB, more than a second at the lowest rate."""


class Machine:
    """Region and process of one rank, whose buddy is the other rank."""

    def __init__(
        self, base: Path, rank: int, run_id: str, session: str, listener: socket.socket
    ) -> None:
        self.rank, self.base, self.listener = rank, base, listener
        self.folder = run_folder(run_id, base=base)
        described = description(
            base / "checkpoint", rank, 2, run_id=run_id, session=session, large_elements=_LARGE
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
        """Return the next response."""
        assert self.process is not None
        found: list[dict[str, Any]] = []

        def any_response() -> bool:
            found.extend(self.process.responses() if self.process else [])
            return bool(found)

        wait_until(any_response, timeout_s)
        return found[0]

    def copies(self) -> Region:
        """Return the copies on this machine."""
        return Region.open(region_path(self.folder, 1 - self.rank, COPY))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    made = list(_machines(tmp_path, secrets.token_hex(16), "5e55"))
    yield made
    _close(made)


def _machines(base: Path, run_id: str, session: str) -> Iterator[Machine]:
    for rank in range(2):
        listener = socket.create_server(("127.0.0.1", 0))
        (base / f"machine-{rank}").mkdir(exist_ok=True)
        yield Machine(base / f"machine-{rank}", rank, run_id, session, listener)


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


def test_another_step_or_session_is_not_taken(machines: list[Machine]) -> None:
    start(machines)
    for machine in machines:
        snapshot(machine.region, 0, 7)
    machines[0].order(1, 7, segment=5)
    machines[1].order(1, 7)
    response = machines[0].response()
    assert response["failed"] == 1 and "is ordered" in response["error"]


def test_a_later_session_keeps_the_copies_until_it_has_its_own(tmp_path: Path) -> None:
    run_id = secrets.token_hex(16)
    for session, step in (("aa", 7), ("bb", 9)):
        machines = list(_machines(tmp_path, run_id, session))
        start(machines)
        for machine in machines:
            snapshot(machine.region, 0, step)
            machine.order(1, step)
        assert machines[0].response() == {"received": 1, "source": 1}
        _close(machines)
    copies = machines[0].copies()
    assert (sorted(copies.complete_slots()), copies.sessions) == ([7, 9], ["bb", "aa"])
    copies.close()


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
    wait_until(lambda: region_path(machines[0].folder, 1, COPY).exists(), 30)
    process = machines[0].process
    assert process is not None
    running = process._process
    assert running is not None and running.stdin is not None
    running.stdin.close()
    assert running.wait(10) == 0
    copies = machines[0].copies()
    assert [slot.state for slot in copies.slots()] == [SlotState.COPYING, SlotState.EMPTY]
    copies.close()
