"""Monitor of the TCP connections between ranks: links that are slow, and links that are dead.

A rank that waits in a collective does not know why. The kernel does: on a slow link data wait in
the send queue of a connection, on a dead one they are retransmitted without an answer. A receiver
that does not read is no fault of the link: its window is closed, the kernel probes it, and data
wait in its own queue. Read from /proc/net/tcp and from the descriptors of the ranks, without help
of the ranks.
"""

import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.diagnosis import Cause, Diagnosis

RankId = tuple[int, int]
"""Replica, and rank in it."""
Link = tuple[RankId, RankId]
"""Sender and receiver."""
SAMPLE_INTERVAL_S = 0.25
_WINDOW = 40
"""Samples per decision: ten seconds."""
_TIMES_OTHERS, _LEAST_OTHERS = 3.0, 0.2
"""A slow link has data in the send queue this many times as often as the links of the other ranks,
which count as busy for at least that fraction of the samples: all are busy where communication
takes most of a step, or where ranks wait for a processor before they read."""
_IDLE = 0.2
"""Fraction of the samples below which a link is no longer slow."""
_DEAD_RETRANSMISSIONS = 3
"""Retransmissions of one segment without an answer: more than a second."""
_DEAD_SAMPLES = 8
"""Consecutive samples with dead links before a diagnosis."""
_REPEAT_S = 10.0
"""Time without a dead link before another is reported."""
_EFFECT_S = 60.0
"""Time after a dead link in which a hang is its effect."""
_MAX_LOAD = 0.02
"""Fraction of CPU time spent on samples. A machine with many connections is sampled less often."""
_PROBES = 0x04
"""Timer of a connection that probes its receiver."""
_INODES_S = 2.0
"""Interval between reads of the descriptors of the ranks."""
_ESTABLISHED = 0x01
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection, as the kernel shows it."""

    local: str
    remote: str
    queued_bytes: int
    """Sent or to be sent, and not acknowledged."""
    retransmissions: int
    is_probed: bool
    """Whether the receiver is probed: it has no room, or this end may send at a low rate only."""
    inode: int
    unread_bytes: int = 0
    """Received, and not read by this end."""

    def waits_for_link(self, receiver: "Connection") -> bool:
        """Whether data wait, and not for the receiver to read."""
        return self.queued_bytes > 0 and not (self.is_probed and receiver.unread_bytes > 0)


class LinkMonitor:
    """Monitor of the links between the ranks of all replicas."""

    def __init__(self) -> None:
        self._busy: deque[set[Link]] = deque(maxlen=_WINDOW)
        self._ranks: dict[RankId, int] = {}
        self._owners: dict[int, RankId] = {}
        """Ranks by the inodes of their sockets."""
        self._read_owners_at_s = self._due_s = 0.0
        self._slow: set[RankId] = set()
        self._num_dead = 0
        """Consecutive samples with dead links."""
        self._last_dead_s: dict[int, float] = {}
        """When a dead link of a replica that was reported was last seen."""

    def explains_hang(self, replica: int, now_s: float) -> bool:
        """Return whether a dead link of the replica was reported, and is or was just dead."""
        return now_s - self._last_dead_s.get(replica, -math.inf) < _EFFECT_S

    def poll(
        self, ranks: Mapping[RankId, int], now_s: float, *, is_symmetric: bool
    ) -> list[Diagnosis]:
        """Sample the connections if it is time; `ranks` are the process ids of all ranks. Return
        the diagnoses of links that became slow or dead. Links are compared only if `is_symmetric`:
        all ranks send equally much now."""
        if now_s < self._due_s or not ranks:
            return []
        # CPU time: waiting for a processor costs others nothing.
        started_s = time.thread_time()
        if dict(ranks) != self._ranks:
            # Restarted ranks have other connections.
            self._ranks, self._read_owners_at_s = dict(ranks), 0.0
            self._num_dead = 0
            self._busy.clear()
            self._slow.clear()
        if now_s >= self._read_owners_at_s:
            self._read_owners_at_s = now_s + _INODES_S
            self._owners = dict(_socket_owners(ranks))
        diagnoses = self.observe(
            list(_connections(ranks.values())), self._owners, now_s, is_symmetric=is_symmetric
        )
        cost_s = time.thread_time() - started_s
        self._due_s = now_s + max(SAMPLE_INTERVAL_S, cost_s / _MAX_LOAD)
        return diagnoses

    def observe(
        self,
        connections: Iterable[Connection],
        owners: Mapping[int, RankId],
        now_s: float,
        *,
        is_symmetric: bool,
    ) -> list[Diagnosis]:
        """Record a sample of all connections of this machine, and return what became wrong."""
        by_link = list(_links(list(connections), owners))
        waiting = [(link, end) for link, end, far in by_link if end.waits_for_link(far)]
        self._busy.append({link for link, _ in waiting})
        dead = {link for link, end in waiting if end.retransmissions >= _DEAD_RETRANSMISSIONS}
        self._num_dead = self._num_dead + 1 if dead else 0
        if dead or not is_symmetric:
            # The queues of dead links are full, too. Not all of them have retransmitted as often.
            self._busy.clear()
        if dead:
            return self._dead_links(dead, now_s)
        return self._slow_links({sender for (sender, _), _, _ in by_link})

    def _dead_links(self, dead: set[Link], now_s: float) -> list[Diagnosis]:
        replicas = {replica for link in dead for replica, _ in link}
        last_s = max(self._last_dead_s.get(replica, -math.inf) for replica in replicas)
        is_reported = now_s - last_s < _REPEAT_S
        if not is_reported and self._num_dead < _DEAD_SAMPLES:
            return []
        self._last_dead_s.update(dict.fromkeys(replicas, now_s))
        return [] if is_reported else [_dead_link(dead)]

    def _slow_links(self, senders: set[RankId]) -> list[Diagnosis]:
        if len(self._busy) < _WINDOW or len(senders) < 2:
            return []
        counts = Counter(link for sample in self._busy for link in sample)
        busiest = {
            sender: max((count for link, count in counts.items() if link[0] == sender), default=0)
            / _WINDOW
            for sender in senders
        }
        newly_slow = []
        for sender, fraction in busiest.items():
            peer_fractions = sorted(
                peer_fraction for rank, peer_fraction in busiest.items() if rank != sender
            )
            if fraction < _IDLE:
                self._slow.discard(sender)
            elif fraction >= _TIMES_OTHERS * max(
                _LEAST_OTHERS, peer_fractions[len(peer_fractions) // 2]
            ):
                if sender not in self._slow:
                    newly_slow.append(_slow_link(sender, fraction))
                self._slow.add(sender)
        return newly_slow


def _slow_link(sender: RankId, fraction: float) -> Diagnosis:
    text = f"data waited to be sent to another rank {fraction:.0%} of the time"
    return Diagnosis(cause=Cause.SLOW_LINK, text=text, replica=sender[0], rank=sender[1])


def _dead_link(dead: Iterable[Link]) -> Diagnosis:
    """Name the rank that is at an end of the most dead links."""
    links = {frozenset(link) for link in dead}
    counts = Counter(rank for link in links for rank in link)
    most = max(counts.values())
    replica, rank = min(end for end, count in counts.items() if count == most)
    peers = sorted({end for link in links if (replica, rank) in link for end in link})
    peers.remove((replica, rank))
    names = ", ".join(f"rank {number} of replica {its}" for its, number in peers)
    text = f"data sent between it and {names} are not acknowledged"
    return Diagnosis(
        cause=Cause.DEAD_LINK, text=text, replica=replica, rank=rank, peers=tuple(peers)
    )


def _links(
    connections: list[Connection], owners: Mapping[int, RankId]
) -> Iterator[tuple[Link, Connection, Connection]]:
    """Yield both ends of each connection between two ranks, that of the sender first, with the
    link."""
    ends = {(end.local, end.remote): end for end in connections}
    for end in connections:
        far = ends.get((end.remote, end.local))
        sender, receiver = owners.get(end.inode), far and owners.get(far.inode)
        if far is not None and sender is not None and receiver is not None and sender != receiver:
            yield (sender, receiver), end, far


def _socket_owners(ranks: Mapping[RankId, int]) -> Iterator[tuple[int, RankId]]:
    for rank, pid in ranks.items():
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if socket := _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}")):
                        yield int(socket[1]), rank


def _connections(pids: Iterable[int]) -> Iterator[Connection]:
    """Yield the established connections in the network namespaces of the processes, each once."""
    namespaces: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            namespaces.setdefault(os.readlink(f"/proc/{pid}/ns/net"), pid)
    for pid in namespaces.values():
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                yield from parse_connections(Path(f"/proc/{pid}/net/{table}").read_text())


def parse_connections(table: str) -> Iterator[Connection]:
    """Yield the established connections in the text of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        # sl, local, remote, state, tx:rx, timer:when, retransmissions, uid, probes, inode
        words = line.split()
        with suppress(ValueError, IndexError):
            if int(words[3], 16) == _ESTABLISHED:
                queued, _, unread = words[4].partition(":")
                yield Connection(
                    _address(words[1]),
                    _address(words[2]),
                    queued_bytes=int(queued, 16),
                    retransmissions=int(words[6], 16),
                    is_probed=int(words[5].partition(":")[0], 16) == _PROBES,
                    inode=int(words[9]),
                    unread_bytes=int(unread, 16),
                )


def _address(text: str) -> str:
    """Return the last 32 bits of an address, and its port: an IPv4 address has one form in both
    tables."""
    return text[-13:]
