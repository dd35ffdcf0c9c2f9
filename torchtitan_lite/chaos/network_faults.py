"""A network that breaks, and strangers on it, who say what nobody expects. Layer: above
process_faults."""

import ctypes
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from torchtitan_lite.chaos.kind import Kind, Target, kinds_of
from torchtitan_lite.chaos.process_faults import processes_of_replica
from torchtitan_lite.chaos.scene import Missed

_GREETINGS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\xff\xff\xff",
    b"\x80\x04\x95",
)
_TIMEOUT_S = 1.0
_HELD_S = 2.0
_MANY = 40
_PIDFD_GETFD = 438
"""The number of the call on all architectures."""


def connections_of_a_replica_broken(target: Target) -> None:
    """All that it has with others, as where a switch starts anew. Those among its own processes
    stay."""
    if not _cut(processes_of_replica(target)):
        raise Missed("no connection of the replica was there, or could be broken")


def strangers_call_the_lighthouse(target: Target) -> None:
    """A scan of ports: other protocols, half a request, connections that say nothing."""
    _pester(_ports(target.scene.lighthouse()), target)


def strangers_call_who_gives_the_state(target: Target) -> None:
    """The same on the server from which a replica that returns receives its state."""
    ports = [
        port
        for rank in target.scene.ranks(target.replica)
        for port in _ports(rank)
        if _speaks_http(port)
    ]
    _pester(ports, target)


KINDS: dict[str, Kind] = kinds_of(
    connections_of_a_replica_broken,
    strangers_call_the_lighthouse,
    strangers_call_who_gives_the_state,
)


def _cut(processes: list[psutil.Process]) -> int:
    """Break what these processes have with others; how many connections that were."""
    found = [(one.pid, connection) for one in processes for connection in _connections(one)]
    own = {_place(connection.laddr) for _, connection in found}
    return sum(_break(pid, one) for pid, one in found if _place(one.raddr) not in own)


def _connections(process: psutil.Process) -> list[Any]:
    with suppress(psutil.NoSuchProcess):
        return [
            one
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED and one.fd >= 0
        ]
    return []


def _break(pid: int, connection: Any) -> bool:
    """Shut a socket of another process down, by a descriptor of one's own."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, connection.fd, 0)
        finally:
            os.close(process)
        if copy < 0:
            # Closed meanwhile, or not allowed.
            return False
        with suppress(OSError), socket.socket(fileno=copy) as held:
            # The number may be that of another file by now.
            if _place(held.getpeername()) == _place(connection.raddr):
                held.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _place(address: Sequence[Any]) -> tuple[str, int]:
    """The same for a server that takes both families and a client that knows one."""
    return address[0].removeprefix("::ffff:"), address[1]


def _ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Where a process listens."""
    with suppress(psutil.NoSuchProcess):
        return [
            (one.laddr.ip, one.laddr.port)
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
    return []


def _speaks_http(place: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(place, _TIMEOUT_S) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(5) == b"HTTP/"
    return False


def _pester(places: list[tuple[str, int]], target: Target) -> None:
    if not places:
        raise Missed("nobody listens")
    held = []
    try:
        for _ in range(_MANY):
            with suppress(OSError):
                connection = socket.create_connection(target.draw.choice(places), _TIMEOUT_S)
                held.append(connection)
                connection.sendall(
                    target.draw.choice((*_GREETINGS, target.draw.randbytes(200), b""))
                )
        time.sleep(_HELD_S)
    finally:
        for connection in held:
            connection.close()
