"""Addresses of this machine on the routes to others. Layer: imports nothing of the project."""

import os
import socket

import psutil


def address_toward(host: str, port: int) -> str:
    """Return the address of the interface that routes to `host`. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it only selects the route.
        probe.connect(place)
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface with `address`; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address.partition("%")[0] for one in addresses):
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
        interface = interface_of(address_toward(master, int(os.environ.get("MASTER_PORT", "1"))))
    except (OSError, ValueError):
        # Connecting to the master reports it.
        return
    # On the master's machine the name may resolve to a loopback address, which others cannot reach.
    if interface is not None and interface != "lo":
        os.environ["GLOO_SOCKET_IFNAME"] = interface
