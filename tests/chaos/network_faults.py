"""Broken connections, and unexpected clients of the job's servers."""

import ctypes
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tests.chaos.job_view import FaultNotApplicable, FaultTarget

_PAYLOADS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\xff\xff\xff",
    b"\x80\x04\x95",
)
_TIMEOUT_S = 1.0
_HOLD_S = 2.0
_NUM_CONNECTIONS = 40
_PIDFD_GETFD = 438
"""The system call's number, the same on all architectures."""


def replica_connections_broken(target: FaultTarget) -> None:
    """Break all connections of a replica to other processes, as a restarting switch does.
    Connections among the replica's own processes stay."""
    if not _break_connections(target.job.replica_processes(target.replica)):
        raise FaultNotApplicable("the replica has no connection that could be broken")


def lighthouse_ports_scanned(target: FaultTarget) -> None:
    """Scan the lighthouse's ports: other protocols, half a request, silent connections."""
    _scan(_listening_ports(target.job.lighthouse()), target)


def state_server_ports_scanned(target: FaultTarget) -> None:
    """Scan the server that sends the state to a healing replica."""
    addresses = [
        address
        for rank in target.job.ranks(target.replica)
        for address in _listening_ports(rank)
        if _speaks_http(address)
    ]
    _scan(addresses, target)


FAULTS = (replica_connections_broken, lighthouse_ports_scanned, state_server_ports_scanned)


def _break_connections(processes: list[psutil.Process]) -> int:
    """Break the connections of these processes to others, and return how many were broken."""
    connections = [
        (process.pid, connection)
        for process in processes
        for connection in established_connections(process)
    ]
    own = {_normalized(connection.laddr) for _, connection in connections}
    return sum(
        _break_connection(pid, connection)
        for pid, connection in connections
        if _normalized(connection.raddr) not in own
    )


def established_connections(process: psutil.Process) -> list[Any]:
    """Return the established TCP connections of a process."""
    with suppress(psutil.NoSuchProcess):
        return [
            connection
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.fd >= 0
        ]
    return []


def _break_connection(pid: int, connection: Any) -> bool:
    """Shut down a socket of another process."""
    with suppress(OSError), duplicated_socket(pid, connection) as held:
        if held is not None:
            held.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextmanager
def duplicated_socket(pid: int, connection: Any) -> Iterator[socket.socket | None]:
    """Yield the socket of another process by a duplicate of its descriptor; None if it has been
    closed in the meantime."""
    held = None
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            duplicate = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, connection.fd, 0)
        finally:
            os.close(process)
        # Negative if it was closed in the meantime.
        held = socket.socket(fileno=duplicate) if duplicate >= 0 else None
    try:
        yield held if held is not None and _is_peer(held, connection.raddr) else None
    finally:
        if held is not None:
            held.close()


def _is_peer(held: socket.socket, address: Sequence[Any]) -> bool:
    """Return whether a socket is connected to `address`: its descriptor may refer to another file
    by now."""
    with suppress(OSError):
        return _normalized(held.getpeername()) == _normalized(address)
    return False


def _normalized(address: Sequence[Any]) -> tuple[str, int]:
    """Return an address in the same form for dual-stack servers and IPv4 clients."""
    return address[0].removeprefix("::ffff:"), address[1]


def _listening_ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the addresses on which a process listens."""
    with suppress(psutil.NoSuchProcess):
        return [
            (connection.laddr.ip, connection.laddr.port)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
    return []


def _speaks_http(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, _TIMEOUT_S) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.recv(5) == b"HTTP/"
    return False


def _scan(addresses: list[tuple[str, int]], target: FaultTarget) -> None:
    if not addresses:
        raise FaultNotApplicable("no port is open")
    held = []
    try:
        for _ in range(_NUM_CONNECTIONS):
            with suppress(OSError):
                connection = socket.create_connection(target.rng.choice(addresses), _TIMEOUT_S)
                held.append(connection)
                connection.sendall(target.rng.choice((*_PAYLOADS, target.rng.randbytes(200), b"")))
        time.sleep(_HOLD_S)
    finally:
        for connection in held:
            connection.close()
