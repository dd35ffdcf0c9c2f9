"""Limits of connections that have not proved themselves.

Invariant: a stranger never displaces a connection that has proved itself, and one from an address
with many connections displaces its own first, so that strangers cost a bounded number of
descriptors and other addresses still reach the server.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class StrangerLimits:
    """Maximum numbers of connections without a proof."""

    in_all: int
    per_address: int


class Strangers(Generic[_T]):
    """Connections without a proof, the one that was idle for the longest time first. Not
    thread-safe."""

    def __init__(self, limits: StrangerLimits) -> None:
        self._limits = limits
        self._addresses: OrderedDict[_T, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, connection: _T) -> bool:
        return connection in self._addresses

    def add(self, connection: _T, address: str) -> _T | None:
        """Add a connection from `address`, and return the one to close for it, if any."""
        own = [known for known, source in self._addresses.items() if source == address]
        displaced = None
        if len(own) >= self._limits.per_address:
            displaced = own[0]
        elif len(self._addresses) >= self._limits.in_all:
            displaced = next(iter(self._addresses))
        if displaced is not None:
            del self._addresses[displaced]
        self._addresses[connection] = address
        return displaced

    def pop_idlest(self) -> _T | None:
        """Remove the connection that was idle for the longest time, to close it; None if there is
        none."""
        return self._addresses.popitem(last=False)[0] if self._addresses else None

    def touch(self, connection: _T) -> None:
        """Count a connection as just used."""
        if connection in self._addresses:
            self._addresses.move_to_end(connection)

    def discard(self, connection: _T) -> None:
        """Remove a connection that has proved itself or is closed."""
        self._addresses.pop(connection, None)
