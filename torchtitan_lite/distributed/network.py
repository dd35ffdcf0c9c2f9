"""Addresses of this machine on the routes to others, and TCP connections of this process."""

import hashlib
import ipaddress
import math
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_LAST_DATA = 52
"""Offset of tcpi_last_data_recv (32 bits, milliseconds) in Linux' struct tcp_info."""


def address_toward(host: str, port: int) -> str:
    """Return the address of the interface that routes to `host`. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it only selects the route.
        probe.connect(place)
        return probe.getsockname()[0]


def address_for_others(host: str, port: int) -> str:
    """Return the address of this machine on the route to `host` that other machines can reach too:
    the name of this machine may resolve to a loopback address, which they cannot. Raises
    OSError."""
    address = address_toward(host, port)
    if not ipaddress.ip_address(address).is_loopback or names_loopback(host):
        return address
    # The interface of the default route: no packet is sent to these addresses (RFC 5737, 3849).
    try:
        return address_toward("192.0.2.1", port)
    except OSError:
        return address_toward("2001:db8::1", port)


def names_loopback(host: str) -> bool:
    """Return whether `host` means this machine alone; other names may resolve to a loopback address
    on one machine and to another address elsewhere."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def address_of_interface(interface: str) -> str:
    """Return an address of the interface with this name, IPv4 if it has one, or `interface` itself
    if it is an address. Raises ValueError."""
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        try:
            return str(ipaddress.ip_address(interface))
        except ValueError:
            raise ValueError(
                f"{interface!r} is neither an address nor an interface of this machine: "
                f"{', '.join(sorted(interfaces))}."
            ) from None
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[interface]:
            if entry.family == family:
                return entry.address.partition("%")[0]
    raise ValueError(f"Interface {interface} has no address.")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with `address`; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in addresses):
            return name
    return None


def let_gloo_listen_toward_master() -> None:
    """Make gloo groups of processes on several machines listen on the interface that routes to
    MASTER_ADDR, unless the user has chosen one. By itself gloo takes the address to which the host
    name resolves, which on many machines is a loopback address, and torch passes it no other."""
    spans_machines = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    master = os.environ.get("MASTER_ADDR")
    if not spans_machines or not master or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        interface = interface_of(
            address_for_others(master, int(os.environ.get("MASTER_PORT", "1")))
        )
    except (OSError, ValueError):
        # Connecting to the master reports it.
        return
    if interface is not None and interface != "lo":
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def abstract_socket_scope() -> int:
    """Return a number below 2**63 that is equal for processes that reach each other's abstract Unix
    sockets: those of one network namespace. Where there are none it is random."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        identity = f"{boot.read_text()}{os.stat('/proc/self/ns/net').st_ino}".encode()
    except OSError:
        identity = os.urandom(16)
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1


def connections() -> set[int]:
    """Return the TCP connections of this process, each by the inode of its socket."""
    return {inode for inode, _ in _open_connections()}


def cut_connections(which: Collection[int] | None = None) -> None:
    """Cut the TCP connections of this process, so that whatever waits for them fails; all, or those
    with the given inodes."""
    for _, connection in _open_connections(which):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def seconds_since_data(which: Collection[int]) -> float:
    """Return the seconds since any of the TCP connections with these inodes received data; infinity
    if none of them is open."""
    shortest_s = math.inf
    for _, connection in _open_connections(which):
        with suppress(OSError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA + 4)
            (last_ms,) = struct.unpack_from("I", info, _LAST_DATA)
            shortest_s = min(shortest_s, last_ms / 1000)
    return shortest_s


def _open_connections(
    which: Collection[int] | None = None,
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the inode and a duplicate of each TCP socket that does not listen; of all, or of those
    with the given inodes. The duplicate is closed afterwards."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # Another thread may close it at any time.
        with suppress(OSError):
            status = os.fstat(descriptor)
            is_meant = which is None or status.st_ino in which
            if not is_meant or not stat.S_ISSOCK(status.st_mode):
                continue
            duplicate = os.dup(descriptor)
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                # A socket's name that was opened with O_PATH.
                os.close(duplicate)
                continue
            with connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield status.st_ino, connection
