"""A local S3 server (moto) in a thread, that fails now and then and can hold a request."""

import logging
import random
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Held:
    """The first PUT of the `number`th object whose key matches `pattern` reaches the server and has
    no effect: its client is to be killed when `reached` is set, and `gone` to be set after it."""

    pattern: str
    number: int
    reached: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    seen: set[str] = field(default_factory=set)


class Faults:
    """A WSGI application before another. Half of the failures come before the request has its
    effect, half after; half are an answer 503, half a connection that ends in the middle."""

    def __init__(self, app: Callable[..., Iterable[bytes]], share: float) -> None:
        self._app, self.share, self._draws = app, share, random.Random(5)
        self._lock = threading.Lock()
        self.requests = self.failures = 0
        self.put: list[str] = []
        """The keys of objects that were put, in order."""
        self.held: Held | None = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "PUT" and self._is_held(path):
            start("503 Slow Down", [("Content-Length", "0")])
            return []
        with self._lock:
            self.requests += 1
            draw, is_cut = self._draws.random(), self._draws.random() < 0.5
            fails = draw < self.share
            self.failures += fails
        before = draw < self.share / 2
        if not before:
            answer = list(self._app(environ, (lambda *args: None) if fails else start))
            if method == "PUT":
                self.put.append(path)
            if not fails:
                return answer
        else:
            # What is not read would be taken for the next request.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if is_cut and method == "HEAD":
            # Its answer has no body that could end early: 200 would say that the object is there.
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("no answer")
        if is_cut:
            start("200 OK", [("Content-Length", "1000000")])
            return [b"cut"]
        start("503 Slow Down", [("Content-Length", "0")])
        return []

    def _is_held(self, path: str) -> bool:
        held = self.held
        if held is None or not re.search(held.pattern, path):
            return False
        with self._lock:
            held.seen.add(path)
            is_it = len(held.seen) >= held.number
        if is_it:
            held.reached.set()
            held.gone.wait(120)
        return is_it


@contextmanager
def s3_server(share: float) -> Iterator[tuple[str, Faults]]:
    """(its URL, its faults), of a new server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Faults(DomainDispatcherApplication(create_backend_app), 0.0)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        _make_bucket(url)
        app.share = share
        yield url, app
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_bucket(url: str) -> None:
    # What moto holds is common to all servers of a process.
    with urlopen(Request(f"{url}/moto-api/reset", method="POST")):
        pass
    filesystem = s3fs.S3FileSystem(endpoint_url=url, key="none", secret="none")
    filesystem.mkdir(BUCKET)
