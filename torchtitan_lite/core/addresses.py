"""Addresses of this machine for itself, and how they are written."""

import socket


def loopback_address() -> str:
    """Return the address by which processes of this machine reach each other: 127.0.0.1, or ::1
    where only IPv6 exists."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def in_brackets(host: str) -> str:
    """Return a host as it is written before a port: addresses of IPv6 have brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
