"""Links are judged by the kernel's queues and timers."""

from itertools import permutations

from torchtitan_lite.diagnosis import Cause, Diagnosis
from torchtitan_lite.launcher.link_monitor import (
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


Links = dict[tuple[int, int], tuple[int, int, int]]
"""Queued bytes, retransmissions and window probes by the numbers of sender and receiver."""


def _observe(monitor: LinkMonitor, links: Links, times: int) -> list[Diagnosis]:
    """Let the monitor observe three ranks, each of which is connected with the others."""
    pairs = list(permutations(range(3), 2))
    connections = [
        Connection(f"{a}->{b}", f"{b}->{a}", *links.get((a, b), (0, 0, 0)), inode=10 * a + b)
        for a, b in pairs
    ]
    owners: dict[int, RankId] = {10 * a + b: (0, a) for a, b in pairs}
    return [one for _ in range(times) for one in monitor.observe(connections, owners)]


def test_the_kernels_tables() -> None:
    sender, receiver = parse_connections(_TABLE)
    assert (sender.queued_bytes, sender.retransmissions, sender.window_probes) == (50000, 4, 7)
    assert (sender.local, sender.remote) == (receiver.remote, receiver.local)
    assert sender.inode == 222 and receiver.queued_bytes == 0
    assert list(parse_connections(_WITH_IPV6)) == [sender, receiver]
    assert list(parse_connections("damaged\n1 2 3\n")) == []


def test_a_sender_whose_queues_are_full_is_named_once() -> None:
    monitor = LinkMonitor()
    assert _observe(monitor, {}, 50) == []
    (found,) = _observe(monitor, {(1, 2): (4000, 0, 0)}, 60)
    assert (found.cause, found.replica, found.rank) == (Cause.SLOW_LINK, 0, 1)
    # It ends, and begins again.
    assert _observe(monitor, {}, 50) == []
    assert len(_observe(monitor, {(1, 0): (4000, 0, 0)}, 60)) == 1


def test_a_receiver_that_does_not_read_and_a_busy_network_are_no_slow_links() -> None:
    assert _observe(LinkMonitor(), {(1, 2): (4000, 0, 1), (0, 2): (4000, 9, 2)}, 90) == []
    all_busy = {(0, 1): (1, 0, 0), (1, 2): (1, 0, 0), (2, 0): (1, 0, 0)}
    assert _observe(LinkMonitor(), all_busy, 90) == []


def test_the_rank_at_the_end_of_most_dead_links_is_named() -> None:
    monitor = LinkMonitor()
    assert _observe(monitor, {(0, 2): (100, 3, 0)}, 2) == []
    (found,) = _observe(monitor, {(0, 2): (100, 5, 0), (2, 1): (100, 3, 0)}, 30)
    assert (found.cause, found.rank) == (Cause.DEAD_LINK, 2)
    assert found.peers == ((0, 0), (0, 1)) and monitor.has_dead_link
    assert _observe(monitor, {}, 1) == [] and not monitor.has_dead_link


def test_lost_packets_of_a_moment_are_no_dead_link() -> None:
    monitor = LinkMonitor()
    for _ in range(20):
        assert _observe(monitor, {(0, 1): (100, 3, 0)}, 3) == []
        assert _observe(monitor, {}, 1) == []
