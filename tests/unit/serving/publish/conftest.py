"""A publisher of one rank, in this process."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes import free_port
from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.checkpoint.shared_memory import free_run
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.serving.publish import Subscriber
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import Block, PinnedPart

Publish = Callable[..., Publisher]
SECRET = "0123456789abcdef0123456789abcdef"


def open_publisher(
    folder: Path,
    run_id: str,
    mesh: Mesh,
    tensors: Mapping[str, torch.Tensor],
    model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Publisher:
    """Open a publisher of `tensors` with these settings of [publish]."""
    config = PublishConfig(enable=True, **settings)
    generation_id = broadcast_bytes(secrets.token_hex(6).encode()).decode()
    return Publisher(
        config,
        tensors,
        mesh,
        identity=RunIdentity(run_id, generation_id),
        folder=folder,
        model=model or {},
        secret=SECRET,
    )


def complete(publisher: Publisher, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Publish a version, and wait until subscribers see it."""
    assert publisher.publish(version, tensors)
    publisher._finish_last()


def remote_subscriber(port: int) -> Subscriber:
    """Connect to the servers of the publisher at this port."""
    return Subscriber(f"http://127.0.0.1:{port}", secret=SECRET, timeout_s=10)


def received(part: PinnedPart, wanted: Sequence[Block]) -> list[torch.Tensor]:
    """Receive blocks, without deltas."""
    contents = part.receive(wanted, {}, lambda: False).contents
    return [one for one in contents if isinstance(one, torch.Tensor)]


@pytest.fixture
def port() -> int:
    """A free port."""
    return free_port()


@pytest.fixture
def run_id() -> Iterator[str]:
    """The id of a run whose shared memory is freed at the end."""
    chosen = secrets.token_hex(16)
    yield chosen
    with suppress(CheckpointError):
        free_run(chosen)


@pytest.fixture
def publish(tmp_path: Path, run_id: str, mesh: Mesh) -> Iterator[Publish]:
    """Return a function (tensors, model, settings of [publish]) -> a publisher, which is closed at
    the end."""
    with ExitStack() as stack:

        def opened(*args: Any, **settings: Any) -> Publisher:
            publisher = open_publisher(tmp_path, run_id, mesh, *args, **settings)
            stack.callback(publisher.close)
            return publisher

        yield opened
