"""Buckets of a round: what is received is unpacked once it has arrived."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.core.errors import RedistributionError
from torchtitan_lite.distributed.redistribute.execution.collective_transport import (
    BoundCollectiveTransport,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory_transport import (
    BoundSharedMemoryTransport,
)


class _Work:
    """A transfer that arrives when it is awaited."""

    def __init__(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._received, self._content = received, sent.clone()

    def wait(self) -> None:
        self._received.copy_(self._content)


def test_a_bucket_is_unpacked_after_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all(received: torch.Tensor, sent: torch.Tensor, *given: Any, **named: Any) -> _Work:
        return _Work(received, sent)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    bound: Any = object.__new__(BoundCollectiveTransport)
    bound._transport = SimpleNamespace(
        buckets=[SimpleNamespace(received_elements=[4], sent_elements=[4])] * 3,
        buffer=lambda parity: torch.zeros(8, dtype=torch.uint8),
        split=lambda buffer, number: (buffer[:4], buffer[4:]),
        width=1,
        group=None,
    )
    unpacked: list[list[int]] = []
    bound._pack = lambda number, buffer: buffer.fill_(number + 1)
    bound._unpack = lambda number, buffer: unpacked.append(buffer.tolist())
    bound.run()
    assert unpacked == [[1] * 4, [2] * 4, [3] * 4]


def test_only_an_exchange_that_ended_half_way_is_final() -> None:
    bound: Any = object.__new__(BoundSharedMemoryTransport)
    bound._memory, bound._buckets = SimpleNamespace(broken=False), []
    bound._run = lambda memory, count: None
    for _ in range(2):
        bound.run()

    def fail(memory: object, count: int) -> None:
        raise KeyboardInterrupt

    bound._run = fail
    with pytest.raises(KeyboardInterrupt):
        bound.run()
    with pytest.raises(RedistributionError, match="ended half-way"):
        bound.run()
