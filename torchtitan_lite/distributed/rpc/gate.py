"""Gate of a gRPC server: accepts its connections, of which strangers get few for a short time, and
passes their bytes on.

Python's gRPC server bounds neither the number of connections nor their idle time, and gives no
access to them: 1,500 connections use up the descriptors of its process. So it listens on a Unix
socket that only this process can reach, and every connection passes through the gate. The gate
connects each under a name of its own; by that name, which gRPC reports as the peer, a call that has
proved itself is assigned to its connection.

Invariant: a stranger never displaces a connection that has proved itself, and costs gRPC nothing
before it has sent bytes.
"""

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress

import grpc.aio

from torchtitan_lite.distributed.rpc.descriptors import leaves_reserve
from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

PROVE_S = 5.0
"""Time in which a connection must prove itself."""
_EXHAUSTED_S = 0.1
"""Pause after a connection for which there is no descriptor: it stays readable."""
_ACCEPTED_AT_ONCE = 32
"""Connections accepted before calls are served again."""
_SILENT_MS = 8000
"""Time after which a connection whose peer acknowledges nothing is lost."""
_READ_BYTES = 1 << 16
_PEER = "unix-abstract:"
_LIMITS = StrangerLimits(in_all=128, per_address=64)
_UNPROVEN_LIMITS = StrangerLimits(in_all=512, per_address=256)
"""The same if no client can prove itself."""


class Gate:
    """Gate on the running event loop, for clients that connect to `listeners`."""

    def __init__(self, listeners: Sequence[socket.socket], *, must_prove: bool) -> None:
        """`must_prove`: whether calls prove themselves (`trust`)."""
        self._listeners, self._must_prove = listeners, must_prove
        limits = _LIMITS if must_prove else _UNPROVEN_LIMITS
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(limits)
        self._links: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._upstream = -1

    async def open(self, server: grpc.aio.Server) -> None:
        """Start the gRPC server, and accept connections for it. Raises OSError."""
        with tempfile.TemporaryDirectory() as name:
            folder = os.open(name, os.O_PATH | os.O_DIRECTORY)
            try:
                # Short, whatever the folder for temporary files is.
                server.add_insecure_port(f"unix:/proc/self/fd/{folder}/rpc")
                await server.start()
                # It reaches the socket when its name is gone, so that no other process can.
                self._upstream = os.open("rpc", os.O_PATH, dir_fd=folder)
            finally:
                os.close(folder)
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def trust(self, peer: str) -> None:
        """Count a connection, by the peer of a call, as one that has proved itself."""
        link = self._links.get(peer.removeprefix(_PEER))
        if link is not None:
            self._strangers.discard(link)

    def stop_accepting(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()

    def close(self) -> None:
        """Close all connections. The gRPC server must have stopped."""
        for link in self._links.values():
            link.cancel()
        if self._upstream >= 0:
            os.close(self._upstream)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._drop_idlest()
                self._loop.remove_reader(listener)
                self._loop.call_later(_EXHAUSTED_S, self._resume, listener)
                return
            if leaves_reserve(client.fileno()) or self._drop_idlest():
                self._admit(client, address[0])
            else:
                client.close()

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _drop_idlest(self) -> bool:
        idlest = self._strangers.pop_idlest()
        if idlest is not None:
            idlest.cancel()
        return idlest is not None

    def _admit(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
        name = f"rpc-{secrets.token_hex(16)}"
        link = self._links[name] = self._loop.create_task(self._serve(client, name))
        link.add_done_callback(lambda _: self._forget(name, client))
        displaced = self._strangers.add(link, address)
        if displaced is not None:
            displaced.cancel()
        if self._must_prove:
            self._loop.call_later(PROVE_S, self._expire, link)

    def _expire(self, link: "asyncio.Task[None]") -> None:
        if link in self._strangers:
            link.cancel()

    def _forget(self, name: str, client: socket.socket) -> None:
        self._strangers.discard(self._links.pop(name))
        # Here, because a link may be cancelled before it begins.
        client.close()

    async def _serve(self, client: socket.socket, name: str) -> None:
        """Pass on the bytes of a client until either side closes."""
        with suppress(OSError):
            first = await self._loop.sock_recv(client, _READ_BYTES)
            if not first:
                return
            with socket.socket(socket.AF_UNIX) as server:
                server.setblocking(False)
                server.bind(f"\0{name}")
                await self._loop.sock_connect(server, f"/proc/self/fd/{self._upstream}")
                await self._loop.sock_sendall(server, first)
                directions = [
                    self._loop.create_task(self._pass_on(client, server, self._links[name])),
                    self._loop.create_task(self._pass_on(server, client, None)),
                ]
                try:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for direction in directions:
                        direction.cancel()
                    # Their sockets are closed afterwards.
                    await asyncio.gather(*directions, return_exceptions=True)

    async def _pass_on(
        self, source: socket.socket, target: socket.socket, link: "asyncio.Task[None] | None"
    ) -> None:
        """Pass on what `source` sends until it closes; `link` is that of a client which sends."""
        while content := await self._loop.sock_recv(source, _READ_BYTES):
            if link is not None:
                self._strangers.touch(link)
            await self._loop.sock_sendall(target, content)
