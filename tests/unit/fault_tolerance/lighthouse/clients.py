"""Replicas in this process that call a lighthouse, with this project's client or torchft's."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torchft.coordination import LighthouseClient

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.fault_tolerance.lighthouse.member import PURPOSE, SERVICE, Member

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

    def __init__(self, url: str, secret: str | None = None) -> None:
        self._url, self._secret = url, secret
        self._clients: dict[str, Any] = {}
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

    def _client(self, replica_id: str) -> Any:
        if replica_id not in self._clients:
            self._clients[replica_id] = (
                LighthouseClient(self._url, _CONNECT)
                if self._secret is None
                else AuthenticatedClient(self._url, self._secret)
            )
        return self._clients[replica_id]

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            with self._beat_lock:
                for replica_id in sorted(self._alive):
                    self._clients[replica_id].heartbeat(replica_id)


class AuthenticatedClient:
    """This project's client, with the methods of torchft's."""

    def __init__(self, url: str, secret: str, run_id: str = "a run") -> None:
        self._secret, self._run_id = secret, run_id
        self._client = RpcClient(url, SERVICE, secret, PURPOSE)

    def heartbeat(self, replica_id: str) -> None:
        request = {"run_id": self._run_id, "replica_id": replica_id, "unreachable": []}
        self._client.call("Heartbeat", request, 30)

    def quorum(self, replica_id: str, timeout: timedelta, step: int = 0, **options: Any) -> Any:
        member = Member(
            run_id=self._run_id,
            replica_id=replica_id,
            address="",
            store_address="",
            step=step,
            world_size=1,
            state_urls=("",),
            **options,
        )
        request = {"member": member.seal(self._secret), "unreachable": []}
        try:
            answer = self._client.call("Quorum", request, timeout.total_seconds())
        except RpcError as error:
            if error.code is RpcStatus.DEADLINE_EXCEEDED:
                raise TimeoutError from None
            raise
        members = [Member.unseal(one, self._secret) for one in answer["members"]]
        return SimpleNamespace(quorum_id=answer["quorum_id"], participants=members)


@contextmanager
def connect_clients(address: str, secret: str | None = None) -> Iterator[LighthouseClients]:
    """Return replicas of the lighthouse at `address` ("HOST:PORT"); torchft's if there is no
    secret."""
    clients = LighthouseClients(f"http://{address}", secret)
    try:
        yield clients
    finally:
        clients.close()
