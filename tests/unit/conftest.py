"""Fixtures of all unit tests. Flavors that a test registers do not outlive it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.models import families, family


@pytest.fixture(autouse=True)
def own_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in families():
        module = family(name)
        monkeypatch.setattr(module, "FLAVORS", dict(module.FLAVORS))


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Collect the records of the project's logger, which does not propagate to the root."""
    propagate = logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate


class Fsyncs:
    """What each path held when it was last made durable: the content of a file, or the names in a
    folder."""

    def __init__(self) -> None:
        self.synced: dict[Path, Any] = {}

    def record(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.synced[path] = set(os.listdir(path)) if path.is_dir() else path.read_bytes()


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> Fsyncs:
    """Record what this process makes durable, in place of doing so."""
    recorded = Fsyncs()
    monkeypatch.setattr(os, "fsync", recorded.record)
    return recorded


class RecordedStreams:
    """Streams of a GPU that record who waits for what, in order. What runs on them runs at once, on
    the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current: Any = self.stream("main")

    def stream(self, name: str) -> Any:
        def waits(who: str) -> Callable[[Any], None]:
            return lambda other: self.log.append(f"{who} waits for {other.name}")

        return SimpleNamespace(
            name=name,
            wait_stream=waits(name),
            wait_event=waits(name),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
        )

    def current(self, device: object = None) -> Any:
        return self._current

    def set_current(self, stream: Any) -> None:
        self._current = stream

    @contextmanager
    def running_on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def event(self) -> Any:
        event = self.stream("nothing")

        def record(stream: Any = None) -> None:
            name = f"event of {(stream or self._current).name}"
            event.name, event.synchronize = name, self.stream(name).synchronize

        event.record = record
        return event


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> RecordedStreams:
    """Record the waits of CUDA streams; `torch.cuda.Stream` returns one that is called `side`."""
    recorded = RecordedStreams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: recorded.stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", recorded.event)
    monkeypatch.setattr(torch.cuda, "current_stream", recorded.current)
    monkeypatch.setattr(torch.cuda, "stream", recorded.running_on)
    return recorded
