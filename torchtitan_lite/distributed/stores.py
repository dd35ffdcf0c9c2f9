"""Stores through which the ranks of a world find each other."""

import socket

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def listening_store(address: str) -> TCPStore:
    """Return a store that listens at `address` only; by itself it would on all interfaces.
    Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return store_at(listener)


def store_at(listener: socket.socket) -> TCPStore:
    """Return a store that listens at a bound socket, which it takes over."""
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
