"""Links are judged by the kernel's queues and timers."""

import os
import time
from dataclasses import replace
from itertools import permutations

import pytest

from torchtitan_lite.core.diagnosis import Cause, Diagnosis
from torchtitan_lite.fault_tolerance.supervision.failures import link_monitor
from torchtitan_lite.fault_tolerance.supervision.failures.link_monitor import (
    Connection,
    LinkMonitor,
    RankId,
    parse_connections,
)

_TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111
   1: 0100007F:8000 0100007F:9000 01 0000C350:00000000 01:00000014 00000004     0        7 222
   2: 0100007F:9000 0100007F:8000 01 00000000:0000C350 00:00000000 00000000     0        0 333
"""
_WITH_IPV6 = _TABLE.replace("0100007F", "0000000000000000FFFF00000100007F")


Links = dict[tuple[int, int], tuple[int, int, bool]]
"""Queued bytes, retransmissions and whether the receiver is probed, by the numbers of sender and
receiver."""


def _observe(
    monitor: LinkMonitor,
    links: Links,
    times: int,
    *,
    now_s: float = 0.0,
    is_symmetric: bool = True,
    unread_by: int | None = None,
) -> list[Diagnosis]:
    """Let the monitor observe three ranks, each of which is connected with the others, and one of
    which may not read."""
    pairs = list(permutations(range(3), 2))
    connections = [
        Connection(
            f"{a}->{b}",
            f"{b}->{a}",
            *links.get((a, b), (0, 0, False)),
            inode=10 * a + b,
            unread_bytes=9 * (a == unread_by),
        )
        for a, b in pairs
    ]
    owners: dict[int, RankId] = {10 * a + b: (0, a) for a, b in pairs}
    return [
        diagnosis
        for _ in range(times)
        for diagnosis in monitor.observe(connections, owners, now_s, is_symmetric=is_symmetric)
    ]


def test_the_kernels_tables() -> None:
    sender, receiver = parse_connections(_TABLE)
    assert (sender.queued_bytes, sender.retransmissions, sender.is_probed) == (50000, 4, False)
    # A stopped receiver answers the probes of its window, so that none is outstanding.
    (stopped, _) = parse_connections(
        _TABLE.replace(" 01:00000014 00000004", " 04:00000014 00000000")
    )
    assert stopped.is_probed and not stopped.waits_for_link(receiver)
    # One that sends at a low rate probes too, while nothing is on its way to a receiver that reads.
    assert receiver.unread_bytes == 50000
    assert stopped.waits_for_link(replace(receiver, unread_bytes=0))
    assert (sender.local, sender.remote) == (receiver.remote, receiver.local)
    assert sender.inode == 222 and receiver.queued_bytes == 0
    assert list(parse_connections(_WITH_IPV6)) == [sender, receiver]
    assert list(parse_connections("damaged\n1 2 3\n")) == []


def test_a_sender_whose_queues_are_full_is_named_once() -> None:
    monitor = LinkMonitor()
    assert _observe(monitor, {}, 50) == []
    (found,) = _observe(monitor, {(1, 2): (4000, 0, False)}, 60)
    assert (found.cause, found.replica, found.rank) == (Cause.SLOW_LINK, 0, 1)
    # It ends, and begins again.
    assert _observe(monitor, {}, 50) == []
    assert len(_observe(monitor, {(1, 0): (4000, 0, False)}, 60)) == 1


def test_a_receiver_that_does_not_read_and_a_busy_network_are_no_slow_links() -> None:
    probed: Links = {(1, 2): (4000, 0, True), (0, 2): (4000, 9, True)}
    assert _observe(LinkMonitor(), probed, 90, unread_by=2) == []
    (found,) = _observe(LinkMonitor(), {(1, 2): (4000, 0, True)}, 90)
    assert (found.cause, found.rank) == (Cause.SLOW_LINK, 1)
    all_busy = {(0, 1): (1, 0, False), (1, 2): (1, 0, False), (2, 0): (1, 0, False)}
    assert _observe(LinkMonitor(), all_busy, 90) == []


def test_links_are_not_compared_while_ranks_send_unequally_much() -> None:
    monitor, busy = LinkMonitor(), {(1, 2): (4000, 0, False)}
    assert _observe(monitor, busy, 90, is_symmetric=False) == []
    # What was seen before, such as healing, does not count.
    assert _observe(monitor, busy, 39) == []
    assert len(_observe(monitor, busy, 1)) == 1


def test_a_link_that_is_busy_half_the_time_is_not_slow() -> None:
    monitor = LinkMonitor()
    for _ in range(60):
        assert _observe(monitor, {(1, 2): (4000, 0, False)}, 1) == []
        assert _observe(monitor, {}, 1) == []


def test_a_slow_table_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(pids: object) -> list[Connection]:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return []

    monkeypatch.setattr(link_monitor, "_connections", slow)
    monitor, reads = LinkMonitor(), []
    observe = monitor.observe
    monkeypatch.setattr(monitor, "observe", lambda *a, **k: reads.append(a[2]) or observe(*a, **k))
    for now_s in (0.0, 0.5, 0.99, 60.0):
        monitor.poll({(0, 0): os.getpid()}, now_s, is_symmetric=True)
    assert reads == [0.0, 60.0]


@pytest.mark.parametrize(
    ("connection", "num_samples", "num_reports"),
    [
        # A slow link is reported again of other ranks, and a dead one that stays dead is not.
        ((4000, 0, False), 40, 2),
        ((100, 5, False), 8, 1),
    ],
)
def test_restarted_ranks_are_judged_by_their_own_links(
    monkeypatch: pytest.MonkeyPatch,
    connection: tuple[int, int, bool],
    num_samples: int,
    num_reports: int,
) -> None:
    monitor, found = LinkMonitor(), []

    def poll(pid: int, times: int) -> None:
        for _ in range(times):
            now_s = monitor._due_s + 1
            found.extend(monitor.poll({(0, 0): pid, (0, 1): pid + 1}, now_s, is_symmetric=True))

    slow = Connection("0->1", "1->0", *connection, inode=1)
    other = Connection("1->0", "0->1", 0, 0, False, inode=2)
    monkeypatch.setattr(link_monitor, "_connections", lambda pids: [slow, other])
    monkeypatch.setattr(link_monitor, "_socket_owners", lambda ranks: {1: (0, 0), 2: (0, 1)})
    poll(100, num_samples - 1)
    poll(200, num_samples - 1)
    assert found == []
    poll(200, 1)
    assert len(found) == 1
    poll(300, 100)
    assert len(found) == num_reports


def test_the_rank_at_the_end_of_most_dead_links_is_named() -> None:
    monitor = LinkMonitor()
    assert _observe(monitor, {(0, 2): (100, 3, False)}, 2) == []
    (found,) = _observe(monitor, {(0, 2): (100, 5, False), (2, 1): (100, 3, False)}, 30)
    assert (found.cause, found.rank) == (Cause.DEAD_LINK, 2)
    assert found.peers == ((0, 0), (0, 1))


def test_a_hang_of_a_replica_is_explained_by_its_own_dead_link_once_that_was_reported() -> None:
    monitor, dead = LinkMonitor(), {(0, 2): (100, 5, False)}
    assert _observe(monitor, dead, 7) == [] and not monitor.explains_hang(0, 0)
    assert len(_observe(monitor, dead, 1)) == 1
    assert monitor.explains_hang(0, 59) and not monitor.explains_hang(1, 59)
    # It works for a moment, and is dead again.
    assert _observe(monitor, {}, 1, now_s=8) == []
    assert _observe(monitor, dead, 8, now_s=9) == []
    assert monitor.explains_hang(0, 68) and not monitor.explains_hang(0, 70)
    # It works for longer.
    assert _observe(monitor, {}, 1, now_s=12) == []
    assert len(_observe(monitor, dead, 8, now_s=20)) == 1
    assert monitor.explains_hang(0, 79)


def test_lost_packets_of_a_moment_are_no_dead_link() -> None:
    monitor = LinkMonitor()
    for _ in range(20):
        assert _observe(monitor, {(0, 1): (100, 3, False)}, 3) == []
        assert _observe(monitor, {}, 1) == []


def test_sockets_are_assigned_to_ranks_anew_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[float] = []
    monkeypatch.setattr(link_monitor, "_connections", lambda pids: [])
    monkeypatch.setattr(
        link_monitor, "_socket_owners", lambda ranks: (read.append(now_s), {}.items())[1]
    )
    monitor, first_s = LinkMonitor(), 1000.0
    last_s = first_s + link_monitor._INODES_S
    for now_s in (first_s, last_s - 1, last_s):
        monitor.poll({(0, 0): 1}, now_s, is_symmetric=True)
    assert read == [first_s, last_s]
    # Those of other processes are read at once.
    now_s = last_s + 1
    monitor.poll({(0, 0): 2}, now_s, is_symmetric=True)
    assert read[2:] == [now_s]
