"""Replicas that talk to a lighthouse through torchft's client, all in this process."""

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
class Told:
    """A quorum as a replica hears of it."""

    quorum_id: int
    members: tuple[tuple[str, int], ...]
    """(id, step), in the order of the quorum."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(replica_id for replica_id, _ in self.members)


class Crew:
    """Replicas of one lighthouse, each with a client of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: dict[str, LighthouseClient] = {}
        self._living: set[str] = set()
        self._beat_lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(8)
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def live(self, *ids: str) -> None:
        """They send a heartbeat now, and go on to."""
        for replica_id in ids:
            self._client(replica_id).heartbeat(replica_id)
        with self._beat_lock:
            self._living |= set(ids)

    def die(self, *ids: str) -> None:
        """They send no more heartbeats from now on."""
        with self._beat_lock:
            self._living -= set(ids)

    def ask(self, replica_id: str, timeout_s: float = 30.0, **asked: Any) -> "Future[Told | None]":
        """One asks for a quorum; None when it gives up."""
        return self._threads.submit(self._ask, replica_id, timeout_s, asked)

    def ask_all(self, *ids: str, **asked: Any) -> list[Told | None]:
        """All ask at once; what they hear."""
        return [answer.result() for answer in [self.ask(one, **asked) for one in ids]]

    def close(self) -> None:
        """End all threads."""
        self._ended.set()
        self._beating.join()
        self._threads.shutdown()

    def _ask(self, replica_id: str, timeout_s: float, asked: dict[str, Any]) -> Told | None:
        try:
            quorum = self._client(replica_id).quorum(
                replica_id, timedelta(seconds=timeout_s), **asked
            )
        except TimeoutError:
            return None
        members = tuple((one.replica_id, one.step) for one in quorum.participants)
        return Told(int(quorum.quorum_id), members)

    def _client(self, replica_id: str) -> LighthouseClient:
        if replica_id not in self._clients:
            self._clients[replica_id] = LighthouseClient(self._url, _CONNECT)
        return self._clients[replica_id]

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            with self._beat_lock:
                for replica_id in sorted(self._living):
                    self._clients[replica_id].heartbeat(replica_id)


@contextmanager
def crew_of(address: str) -> Iterator[Crew]:
    """Replicas of the lighthouse at `address` ("HOST:PORT")."""
    crew = Crew(f"http://{address}")
    try:
        yield crew
    finally:
        crew.close()
