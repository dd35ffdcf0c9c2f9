"""Faults of the connections between ranks, injected in the kernel: the ranks do not take part."""

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tests.chaos.network_faults import duplicated_socket, established_connections

Place = tuple[int, int]
"""Replica and rank."""
_UNLIMITED = 0xFFFFFFFF
_SO_MAX_PACING_RATE = 47


def between_ranks(ranks: Mapping[Place, psutil.Process], place: Place) -> list[tuple[int, int]]:
    """Return the local and remote ports of the connections of one rank to the other ranks."""
    connections = _to_others(ranks, place)
    return [(one.laddr.port, one.raddr.port) for one in connections]


@contextmanager
def pacing(
    ranks: Mapping[Place, psutil.Process], place: Place, bytes_per_s: float
) -> Iterator[None]:
    """Limit the rate at which a rank sends to other ranks during the block."""
    _pace(ranks, place, int(bytes_per_s))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            _pace(ranks, place, _UNLIMITED)


def _pace(ranks: Mapping[Place, psutil.Process], place: Place, bytes_per_s: int) -> None:
    for connection in _to_others(ranks, place):
        with duplicated_socket(ranks[place].pid, connection) as held:
            if held is not None:
                value = struct.pack("I", bytes_per_s)
                held.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)


def _to_others(ranks: Mapping[Place, psutil.Process], place: Place) -> list[Any]:
    own = {one.laddr.port: one for one in established_connections(ranks[place])}
    far = {
        one.laddr.port
        for other, process in ranks.items()
        if other != place
        for one in established_connections(process)
        if one.raddr.port in own
    }
    return [one for one in own.values() if one.raddr.port in far]
