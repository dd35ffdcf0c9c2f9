"""Streams that one rank of each node reads for all ranks of the node.

The lowest rank of a node reads and tokenizes; the others receive its runs over an abstract Unix
socket of this machine. A rank requests the run at its position, with the data set's state there, so
that the reading rank has nothing to lose: what it does not hold, it reads again. Once it is gone,
the others read for themselves. Messages are JSON lines, a run is followed by its arrays.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO, Self

import numpy as np
import torch.distributed as dist

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger
from torchtitan_lite.data.stream_reader import Origin, RunReader, StreamReader, TokenRun
from torchtitan_lite.distributed.host_collectives import all_gather_ints
from torchtitan_lite.distributed.network import abstract_socket_scope

_MAX_HELD_TOKENS = 1 << 26
"""Tokens of a stream that are held for ranks that lag, 4 bytes each. Ranks are at most a step and
its prefetch apart."""
_CLOSE_TIMEOUT_S = 5.0
_NAME = "\0torchtitan_lite-stream-{:x}"
"""Name of an abstract socket."""


def share_streams_on_node() -> "NodeStreams | None":
    """Return this rank's end of the streams of its node; None if it is alone on the node.
    Collective."""
    if dist.get_world_size() == 1:
        return None
    scope, key, listener = abstract_socket_scope(), secrets.randbits(62), None
    ranks = [rank for rank, rank_scope in enumerate(all_gather_ints(scope)) if rank_scope == scope]
    if len(ranks) > 1 and dist.get_rank() == ranks[0]:
        # Before the others learn the name, so that they can connect at once.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_NAME.format(key))
        listener.listen(len(ranks))
    keys = all_gather_ints(key)
    if len(ranks) == 1:
        return None
    if listener is not None:
        return StreamServer(listener, len(ranks))
    return StreamClient(_NAME.format(keys[ranks[0]]))


class _SharedStream:
    """Runs of a stream, each held until all ranks have taken it."""

    def __init__(self, reader: StreamReader, num_ranks: int) -> None:
        self._reader = reader
        self._num_ranks = num_ranks
        self._runs: Iterator[TokenRun] | None = None
        self._next_position = 0
        self._held: dict[int, tuple[TokenRun, set[int]]] = {}
        """Run of tokens and the ranks that have taken it, by position."""
        self._num_held_tokens = 0

    def take(self, origin: Origin, rank: int) -> TokenRun:
        """Return the run at `origin`. Raises DataError."""
        if origin.position not in self._held:
            run = self._read(origin)
            self._held[origin.position] = run, set()
            self._num_held_tokens += len(run.tokens)
        run, takers = self._held[origin.position]
        takers.add(rank)
        if len(takers) >= self._num_ranks:
            self._drop(origin.position)
        while self._num_held_tokens > _MAX_HELD_TOKENS:
            self._drop(next(iter(self._held)))
        return run

    def without_rank(self) -> None:
        """Hold runs for one rank less."""
        self._num_ranks -= 1
        for position, (_, takers) in list(self._held.items()):
            if len(takers) >= self._num_ranks:
                self._drop(position)

    def _read(self, origin: Origin) -> TokenRun:
        if self._runs is None or origin.position != self._next_position:
            self._runs = self._reader.runs(origin)
        try:
            run = next(self._runs)
        except BaseException:
            # An iterator that has raised is at its end.
            self._runs = None
            raise
        self._next_position = run.end
        return run

    def _drop(self, position: int) -> None:
        self._num_held_tokens -= len(self._held.pop(position)[0].tokens)


class StreamServer:
    """The end of the rank that reads. All reading is in one thread, so that a stream has one
    reader."""

    def __init__(self, listener: socket.socket, num_ranks: int) -> None:
        """`num_ranks` are those of the node, this one included."""
        self._listener = listener
        self._num_ranks = num_ranks
        self._streams: list[_SharedStream] = []
        self._readers: list[StreamReader] = []
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream")
        self._accepting = threading.Thread(target=self._accept, name="streams", daemon=True)
        self._serving: list[tuple[threading.Thread, socket.socket]] = []

    def share(self, reader: StreamReader) -> RunReader:
        """Return the source of the runs of `reader` for this rank. Every rank of the node calls it
        for the same streams, in the same order."""
        self._readers.append(reader)
        self._streams.append(_SharedStream(reader, self._num_ranks))
        return _OwnRuns(self, len(self._streams) - 1, reader.name)

    def start(self) -> None:
        """Start to serve the other ranks, once all streams are shared."""
        self._accepting.start()

    def stop(self) -> None:
        """Do nothing: this rank reads on until its data loader is closed."""

    def take(self, stream: int, origin: Origin, rank: int = 0) -> TokenRun:
        """Return the run of a stream at `origin` for a rank, by its number among those of the
        node. Raises DataError."""
        return self._reading.submit(self._streams[stream].take, origin, rank).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop to serve, once the other ranks have closed their ends, or after 5 s. After an error
        wait for none: they may wait for this rank elsewhere."""
        self._close(_CLOSE_TIMEOUT_S if error is None else 0.0)

    def _close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with suppress(OSError):
            # Wakes the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listener.close()
        for thread, connection in self._serving:
            thread.join(max(0.0, deadline - time.monotonic()))
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._reading.shutdown()
        for reader in self._readers:
            reader.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Ranks whose connections wait must not wait longer.
                self._listener.close()
                return
            if not _is_of_this_user(connection):
                connection.close()
                continue
            rank = len(self._serving) + 1
            thread = threading.Thread(
                target=self._serve, args=(connection, rank), name=f"streams-{rank}", daemon=True
            )
            self._serving.append((thread, connection))
            thread.start()

    def _serve(self, connection: socket.socket, rank: int) -> None:
        """Answer the requests of a rank until it closes its end."""
        try:
            with connection, connection.makefile("rb") as requests, suppress(OSError):
                while line := requests.readline():
                    request = json.loads(line)
                    try:
                        run = self.take(request["stream"], Origin.of(request), rank)
                    except DataError as error:
                        connection.sendall(_line(error=str(error)))
                    else:
                        _send(connection, run)
        finally:
            for stream in self._streams:
                self._reading.submit(stream.without_rank).result()


class StreamClient:
    """The end of a rank that receives."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._num_streams = 0
        self._socket: socket.socket | None = None
        self._answers: BinaryIO | None = None
        self._has_failed = False
        self.is_stopped = False

    def share(self, reader: StreamReader) -> RunReader:
        """See `StreamServer.share`. Once the reading rank is gone, `reader` reads."""
        self._num_streams += 1
        return _ReceivedRuns(self, self._num_streams - 1, reader)

    def start(self) -> None:
        """Do nothing: the first request connects."""

    def stop(self) -> None:
        """Interrupt a request in progress, because this rank needs no more runs: the reading rank
        may be gone, and nothing is to be read in its place."""
        self.is_stopped = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def take(self, stream: int, origin: Origin) -> TokenRun:
        """Return the run of a stream at `origin`. Raises DataError, and OSError once the reading
        rank is gone."""
        if self._has_failed or self.is_stopped:
            raise ConnectionError("the connection has ended before")
        try:
            if self._socket is None or self._answers is None:
                self._socket, self._answers = self._connect()
            self._socket.sendall(_line(stream=stream, **origin.values()))
            return _receive(self._answers)
        except OSError:
            self._has_failed = True
            raise

    def _connect(self) -> tuple[socket.socket, BinaryIO]:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._address)
            if not _is_of_this_user(end):
                raise ConnectionError("the socket is of another user")
        except OSError:
            end.close()
            raise
        return end, end.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close this end."""
        for end in (self._answers, self._socket):
            if end is not None:
                end.close()


NodeStreams = StreamServer | StreamClient


class _OwnRuns:
    """Runs for the rank that reads. See `RunReader`."""

    def __init__(self, server: StreamServer, stream: int, name: str) -> None:
        self._server, self._stream, self.name = server, stream, name

    def runs(self, origin: Origin) -> Iterator[TokenRun]:
        while True:
            run = self._server.take(self._stream, origin)
            yield run
            origin = run.following

    def close(self) -> None:
        """Do nothing: the server closes the reader."""


class _ReceivedRuns:
    """Runs that another rank reads. See `RunReader`."""

    def __init__(self, client: StreamClient, stream: int, own: StreamReader) -> None:
        self._client, self._stream, self._own = client, stream, own
        self.name = own.name

    def runs(self, origin: Origin) -> Iterator[TokenRun]:
        while True:
            try:
                run = self._client.take(self._stream, origin)
            except OSError as error:
                if self._client.is_stopped:
                    raise
                logger.warning(
                    "%s: the rank that reads the stream for this node is gone (%s); this rank "
                    "reads it for itself from token %d on.",
                    self.name,
                    error,
                    origin.position,
                )
                break
            yield run
            origin = run.following
        yield from self._own.runs(origin)

    def close(self) -> None:
        self._own.close()


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether the other end of an abstract socket, which has no permissions, is a process of this
    user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return user == os.geteuid()


def _line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _send(connection: socket.socket, run: TokenRun) -> None:
    sizes = {"num_tokens": len(run.tokens), "num_documents": len(run.document_starts)}
    ends = {"origin": run.origin.values(), "following": run.following.values()}
    connection.sendall(_line(**ends, **sizes))
    connection.sendall(run.tokens.astype(np.uint32, copy=False).tobytes())
    connection.sendall(run.document_starts.astype(np.int64, copy=False).tobytes())


def _receive(answers: BinaryIO) -> TokenRun:
    """Read an answer. Raises DataError if it is one, and ConnectionError at the end."""
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("it has closed the connection")
    answer = json.loads(line)
    if "error" in answer:
        raise DataError(answer["error"])
    return TokenRun(
        origin=Origin.of(answer["origin"]),
        following=Origin.of(answer["following"]),
        tokens=_array(answers, np.dtype(np.uint32), answer["num_tokens"]),
        document_starts=_array(answers, np.dtype(np.int64), answer["num_documents"]),
    )


def _array(answers: BinaryIO, dtype: np.dtype, length: int) -> np.ndarray:
    content = answers.read(length * dtype.itemsize)
    if len(content) < length * dtype.itemsize:
        raise ConnectionError("it has closed the connection")
    return np.frombuffer(content, dtype)
