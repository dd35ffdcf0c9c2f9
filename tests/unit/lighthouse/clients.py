"""Replicas that call a lighthouse through torchft's client, all in this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft.coordination import LighthouseClient

_CONNECT = timedelta(seconds=30)
_HEARTBEAT_S = 0.05


@dataclass(frozen=True)
class ReceivedQuorum:
    """A quorum as a replica receives it."""

    quorum_id: int
    members: tuple[tuple[str, int], ...]
    """(id, step), in the order of the quorum."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(replica_id for replica_id, _ in self.members)


class LighthouseClients:
    """Replicas of one lighthouse, with one client each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: dict[str, LighthouseClient] = {}
        self._alive: set[str] = set()
        self._beat_lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(8)
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def start_heartbeats(self, *ids: str) -> None:
        """Send heartbeats from now on."""
        for replica_id in ids:
            self._client(replica_id).heartbeat(replica_id)
        with self._beat_lock:
            self._alive |= set(ids)

    def stop_heartbeats(self, *ids: str) -> None:
        """Stop sending heartbeats."""
        with self._beat_lock:
            self._alive -= set(ids)

    def request(
        self, replica_id: str, timeout_s: float = 30.0, **options: Any
    ) -> "Future[ReceivedQuorum | None]":
        """Request a quorum for one replica; None if it withdraws."""
        return self._threads.submit(self._request, replica_id, timeout_s, options)

    def request_all(self, *ids: str, **options: Any) -> list[ReceivedQuorum | None]:
        """Request a quorum for all replicas at once, and return the quorums that they receive."""
        return [answer.result() for answer in [self.request(one, **options) for one in ids]]

    def close(self) -> None:
        """Stop all threads."""
        self._ended.set()
        self._beating.join()
        self._threads.shutdown()

    def _request(
        self, replica_id: str, timeout_s: float, options: dict[str, Any]
    ) -> ReceivedQuorum | None:
        try:
            quorum = self._client(replica_id).quorum(
                replica_id, timedelta(seconds=timeout_s), **options
            )
        except TimeoutError:
            return None
        members = tuple((one.replica_id, one.step) for one in quorum.participants)
        return ReceivedQuorum(int(quorum.quorum_id), members)

    def _client(self, replica_id: str) -> LighthouseClient:
        if replica_id not in self._clients:
            self._clients[replica_id] = LighthouseClient(self._url, _CONNECT)
        return self._clients[replica_id]

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            with self._beat_lock:
                for replica_id in sorted(self._alive):
                    self._clients[replica_id].heartbeat(replica_id)


@contextmanager
def connect_clients(address: str) -> Iterator[LighthouseClients]:
    """Return replicas of the lighthouse at `address` ("HOST:PORT")."""
    clients = LighthouseClients(f"http://{address}")
    try:
        yield clients
    finally:
        clients.close()
