"""A local S3 server (moto) that fails some requests, and a trainer that saves to it.

`python -m tests.resilience.s3 DUMP_FOLDER ROOT` trains and saves after each step, until it is
killed.
"""

import logging
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import s3fs
import torch

from tests.unit.checkpoint.conftest import SmallState
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_CPU = torch.device("cpu")


@dataclass
class HeldRequest:
    """A request that the server holds: the first PUT of the `number`-th object whose key matches
    `pattern`. It has no effect. The test must kill its client when `reached` is set, then set
    `released`."""

    pattern: str
    number: int
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    keys: set[str] = field(default_factory=set)


class FaultyServer:
    """WSGI middleware that fails requests. Half of the failures occur before the request takes
    effect, half after it; half are a 503 response, half a connection that breaks midway."""

    def __init__(self, app: Callable[..., Iterable[bytes]], failure_rate: float) -> None:
        self._app, self.failure_rate, self._rng = app, failure_rate, random.Random(5)
        self._lock = threading.Lock()
        self.requests = self.failures = 0
        self.put: list[str] = []
        """The keys of all objects that were put, in order."""
        self.held: HeldRequest | None = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "PUT" and self._is_held(path):
            start("503 Slow Down", [("Content-Length", "0")])
            return []
        with self._lock:
            self.requests += 1
            draw, breaks_connection = self._rng.random(), self._rng.random() < 0.5
            fails = draw < self.failure_rate
            self.failures += fails
        fails_before = draw < self.failure_rate / 2
        if not fails_before:
            response = list(self._app(environ, (lambda *args: None) if fails else start))
            if method == "PUT":
                self.put.append(path)
            if not fails:
                return response
        else:
            # Unread bytes would be parsed as the next request.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if breaks_connection and method == "HEAD":
            # A HEAD response has no body to truncate: a 200 would mean that the object exists.
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("no response")
        if breaks_connection:
            start("200 OK", [("Content-Length", "1000000")])
            return [b"truncated"]
        start("503 Slow Down", [("Content-Length", "0")])
        return []

    def _is_held(self, path: str) -> bool:
        held = self.held
        if held is None or not re.search(held.pattern, path):
            return False
        with self._lock:
            held.keys.add(path)
            is_reached = len(held.keys) >= held.number
        if is_reached:
            held.reached.set()
            held.released.wait(120)
        return is_reached


@contextmanager
def s3_server(failure_rate: float) -> Iterator[tuple[str, FaultyServer]]:
    """Start a server with an empty bucket, and return its URL and middleware."""
    # The trainer needs none of this, and importing moto takes seconds.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = FaultyServer(DomainDispatcherApplication(create_backend_app), 0.0)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        _make_bucket(url)
        app.failure_rate = failure_rate
        yield url, app
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_bucket(url: str) -> None:
    # All moto servers of a process share their contents.
    with urlopen(Request(f"{url}/moto-api/reset", method="POST")):
        pass
    filesystem = s3fs.S3FileSystem(endpoint_url=url, key="none", secret="none")
    filesystem.mkdir(BUCKET)


def make_manager(dump_folder: Path, root: str, state: SmallState, mesh: Mesh) -> CheckpointManager:
    """Return the checkpoint manager of a run that saves to `root` after each step."""
    config = CheckpointConfig(enable=True, interval=1, folder=root, ram_interval=0)
    return CheckpointManager(config, dump_folder=dump_folder, state=state, mesh=mesh, run_config={})


def take_step(manager: CheckpointManager, state: SmallState) -> None:
    """Take a step in the order of calls of the trainer."""
    manager.apply_signals(manager.local_signals())
    state.take_step()
    manager.after_step()


def _train(dump_folder: Path, root: str) -> None:
    state = SmallState()
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        manager = make_manager(dump_folder, root, state, mesh)
        while True:
            take_step(manager, state)
            time.sleep(0.02)


if __name__ == "__main__":
    _train(Path(sys.argv[1]), sys.argv[2])
