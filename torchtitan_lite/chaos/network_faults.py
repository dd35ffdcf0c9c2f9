"""Strangers on the network, who say what nobody expects. Layer: above kind."""

import socket
import time
from contextlib import suppress

import psutil

from torchtitan_lite.chaos.kind import Kind, Target, kinds_of
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


KINDS: dict[str, Kind] = kinds_of(strangers_call_the_lighthouse, strangers_call_who_gives_the_state)


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
