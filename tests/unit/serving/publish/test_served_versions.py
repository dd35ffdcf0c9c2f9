"""What is read from a server is of one version of one start of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.fuzzing import (
    FEW_OR_MANY,
    forged_server,
    fuzz,
    json_objects,
    json_values,
    raw_messages,
)
from tests.unit.serving.publish.conftest import (
    SECRET,
    Publish,
    complete,
    received,
    remote_subscriber,
)
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.rpc import state_client, state_server
from torchtitan_lite.distributed.rpc.state_server import FramedState, StateServer
from torchtitan_lite.serving.publish import Subscriber, Target, sources
from torchtitan_lite.serving.publish.publication import open_publication
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import INDEX_VERSION, PURPOSE, VersionGone

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
_MAX_ROWS = 1 << 10
_NUM_ROWS = 2 * _MAX_ROWS + 7
_NUMBERS = torch.arange(_NUM_ROWS * 3, dtype=torch.int32).to(torch.uint8).reshape(-1, 3)


def _published(publish: Publish, port: int, numbers: torch.Tensor, version: int = 7) -> Publisher:
    publisher = publish({"a": numbers}, address="127.0.0.1", port=port)
    complete(publisher, version, {"a": numbers})
    return publisher


def test_many_short_rows_are_received(
    publish: Publish, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources, state_server):
        monkeypatch.setattr(module, "MAX_ROWS", _MAX_ROWS)
    _published(publish, port, _NUMBERS)
    with remote_subscriber(port) as subscriber:
        (rank,) = subscriber.publication.ranks
        pinned = rank.pin(7)
        columns = (slice(0, 1), slice(1, 3))
        blocks = received(pinned, [("a", (slice(0, _NUM_ROWS), one)) for one in columns])
        for block, one in zip(blocks, columns, strict=True):
            assert torch.equal(block, _NUMBERS[:, one])


def test_a_version_of_another_start_is_gone(publish: Publish, port: int) -> None:
    first = _published(publish, port, _NUMBERS)
    with remote_subscriber(port) as subscriber:
        (rank,) = subscriber.publication.ranks
        pinned = rank.pin(7)
        wanted = [("a", (slice(0, 1), slice(0, 3)))]
        assert torch.equal(received(pinned, wanted)[0], _NUMBERS[:1])
        first.close()
        with pytest.raises(VersionGone, match="HTTP 503"):
            received(pinned, wanted)
        _published(publish, port, 1 - _NUMBERS)
        with pytest.raises(VersionGone, match="was replaced"):
            received(pinned, wanted)
        with pytest.raises(VersionGone, match="of another start"):
            rank.pin(7)
        assert subscriber.newest() == 7
        (again,) = subscriber.publication.ranks
        assert torch.equal(received(again.pin(7), wanted)[0], 1 - _NUMBERS[:1])


def test_versions_are_published_once(
    publish: Publish, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": torch.ones(2, 3)}
    publisher = publish(tensors)
    with Subscriber(str(tmp_path)) as subscriber:
        for version in (4, 5):
            assert publisher.publish(version, tensors)
        complete(publisher, 6, tensors)
        # Training has returned to step 4.
        for version in (5, 6):
            assert not publisher.publish(version, tensors)
        assert subscriber.newest() == 6
        complete(publisher, 7, tensors)
        assert subscriber.newest() == 7
    (warning,) = logged.messages
    assert warning.startswith("Version 5 is not published again after a rollback")


def test_the_reason_of_a_failed_receipt_is_kept(publish: Publish, port: int) -> None:
    publisher = _published(publish, port, _NUMBERS)
    with remote_subscriber(port) as subscriber:
        subscription = subscriber.subscribe([Target("a", torch.zeros_like(_NUMBERS))])
        assert publisher._server is not None
        # As a firewall or an error of the server does, which its status does not tell.
        publisher._server.withdraw(7)
        assert subscription.update() is None
        assert "does not serve this state: HTTP 404" in subscription.problem
        assert publisher.publish(8, {"a": _NUMBERS})
        assert subscription.update(timeout_s=60) is not None
        assert subscription.problem == ""


@FEW_OR_MANY
def test_whatever_a_stranger_answers_is_an_error_of_publishing(
    num_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_client, "_UNPROVEN_S", 0.0)

    def check(answer: bytes) -> None:
        server.answer = answer
        with pytest.raises(PublishError):
            open_publication(f"http://127.0.0.1:{server.port}", SECRET)

    with forged_server() as server:
        fuzz(num_examples, check, answer=raw_messages)


@FEW_OR_MANY
def test_an_arbitrary_index_is_an_error_of_publishing(num_examples: int) -> None:
    server = StateServer("127.0.0.1", SECRET, PURPOSE)

    def check(index: Any, rank: Any) -> None:
        for one in (index, {"ranks": index}, {"ranks": [rank]}):
            server.offer(INDEX_VERSION, FramedState(json.dumps(one).encode()))
            with pytest.raises(PublishError):
                open_publication(server.url, SECRET)

    ranks = json_objects("url", "description", "slot_bytes")
    fuzz(num_examples, check, index=json_values, rank=ranks)
    server.close()
