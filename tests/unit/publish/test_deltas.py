"""A shard and its delta give exactly the later shard, in whatever part and dtype it is held."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from benchmarks.processes import free_port
from tests.unit.publish.conftest import SECRET, Publish
from torchtitan_lite.checkpoint import tensor_bytes
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY
from torchtitan_lite.errors import PublishError
from torchtitan_lite.publish import Subscriber, Target, Update
from torchtitan_lite.publish.deltas import Delta, encode_delta
from torchtitan_lite.publish.publisher import Publisher
from torchtitan_lite.redistribute import HolderMesh, Layout
from torchtitan_lite.redistribute.program import RAW_DTYPES

_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
needs_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


def _changed(old: torch.Tensor, positions: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return a copy with other bits at these positions."""
    new = old.clone()
    raw = new.view(-1).view(RAW_DTYPES[old.dtype.itemsize])
    raw[torch.as_tensor(positions)] ^= 1
    return new


def _encode(old: torch.Tensor, new: torch.Tensor) -> bytes | None:
    return encode_delta(tensor_bytes(old), tensor_bytes(new), old.dtype.itemsize)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(70_001,), (300, 1000), (5, 200, 70)])
def test_any_block_of_a_shard_is_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draws = random.Random(f"{dtype} {shape}")
    generator = torch.Generator().manual_seed(len(shape))
    size = torch.Size(shape).numel()
    old = torch.randint(0, 2, shape, generator=generator).to(dtype)
    positions = torch.randperm(size, generator=generator)[: size // 50]
    # The first and the last element, and both sides of a block of positions.
    positions = torch.cat([positions, torch.tensor([0, 65_535, 65_536, size - 1])]).unique()
    new = _changed(old, positions)
    raw = _encode(old, new)
    assert raw is not None and len(raw) < old.nbytes
    delta = Delta.decode(memoryview(raw), shape, dtype)
    assert len(delta.positions) == len(positions) and delta.num_bytes == len(raw)
    for number in range(20):
        starts = [draws.randrange(dim) if number else 0 for dim in shape]
        block = [
            slice(start, draws.randint(start, dim) if number else dim)
            for start, dim in zip(starts, shape, strict=True)
        ]
        held = old[tuple(block)].clone()
        delta.within(block).copy_to(held)
        assert _equal(held, new[tuple(block)])


def test_bits_are_compared_and_not_values() -> None:
    old = torch.zeros(1000)
    old[:2] = torch.nan
    new = old.clone()
    new[1], new[2] = -torch.nan, -0.0
    raw = _encode(old, new)
    assert raw is not None
    delta = Delta.decode(memoryview(raw), (1000,), torch.float32)
    assert delta.positions.tolist() == [1, 2]
    delta.within([slice(0, 1000)]).copy_to(old)
    assert _equal(old, new)


def test_many_changes_have_no_delta() -> None:
    # Over several chunks of the comparison, the limit is one of the whole shard.
    old = torch.zeros(1 << 23, dtype=torch.bfloat16)
    assert _encode(old, _changed(old, range(0, 1 << 23, 4))) is None
    few = _encode(old, _changed(old, range(0, 1 << 23, 5)))
    assert few is not None and len(few) < old.nbytes / 2
    assert _encode(torch.zeros(1), torch.ones(1)) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda raw: raw[:-1], "does not fit shape"),
        (lambda raw: raw[:3], "does not fit shape"),
        (lambda raw: b"\7" + raw[1:], "has 2 elements and counts 7"),
        (lambda raw: raw[:-2] + b"\xff\xff", "positions of a delta"),
        (lambda raw: raw[:-4] + raw[-2:] + raw[-4:-2], "positions of a delta"),
    ],
)
def test_damaged_deltas_are_rejected(change: Any, problem: str) -> None:
    old = torch.zeros(1000)
    raw = _encode(old, _changed(old, [3, 7]))
    assert raw is not None
    with pytest.raises(PublishError, match=problem):
        Delta.decode(memoryview(change(raw)), (1000,), torch.float32)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (300, 500), "experts": (6, 100, 50), "norm": (8,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _step(weights: dict[str, torch.Tensor], *, every: int = 100) -> None:
    """Change every `every`th element, and all of the norm."""
    for name, one in weights.items():
        one.copy_(_changed(one, range(0, one.numel(), 1 if name == "norm" else every)))


@needs_shared_memory
def test_subscribers_receive_changes_only(
    publish: Publish, weights: dict[str, torch.Tensor]
) -> None:
    port = free_port()
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True, keep_versions=4)

    def next_version(step: int) -> None:
        assert publisher.publish(step, weights)
        publisher._finish_last()

    next_version(1)
    columns = Layout(HolderMesh.ranks(2), [Shard(1)])
    fused = torch.zeros(300, 600)
    expert = torch.zeros(100, 50, dtype=torch.bfloat16)
    quantized = torch.zeros(6, 100, 50, dtype=torch.float8_e4m3fn)
    norm = torch.zeros(8)
    with Subscriber(f"http://127.0.0.1:{port}", secret=SECRET, timeout_s=10) as subscriber:
        subscription = subscriber.subscribe(
            [
                Target("w", fused[:, 100:350], columns, 1),
                Target("experts", expert, row=4),
                Target("experts", quantized),
                Target("norm", norm),
            ]
        )

        def receive() -> Update:
            update = subscription.update()
            assert update is not None
            assert torch.equal(fused[:, 100:350], weights["w"][:, 250:])
            assert not fused[:, :100].any() and not fused[:, 350:].any()
            assert torch.equal(expert, weights["experts"][4].bfloat16())
            assert _equal(quantized, weights["experts"].to(torch.float8_e4m3fn))
            assert torch.equal(norm, weights["norm"])
            return update

        first = receive()
        assert first.num_bytes_received == first.num_bytes
        for step in (2, 3):
            _step(weights)
            next_version(step)
            update = receive()
            assert update.num_bytes == first.num_bytes
            assert norm.nbytes < update.num_bytes_received < 0.05 * update.num_bytes
        # Changes of one version do not give the one after it.
        for step in (4, 5):
            _step(weights)
            next_version(step)
        update = receive()
        assert update.num_bytes_received == update.num_bytes
        # Nor are deltas larger than shards received.
        _step(weights, every=2)
        next_version(6)
        update = receive()
        assert update.num_bytes_received == update.num_bytes


@needs_shared_memory
def test_after_a_failed_copy_shards_are_received(
    publish: Publish, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    publisher: Publisher = publish(weights, address="127.0.0.1", port=port, deltas=True)
    held = {name: torch.zeros_like(one) for name, one in weights.items()}
    with Subscriber(f"http://127.0.0.1:{port}", secret=SECRET, timeout_s=10) as subscriber:
        subscription = subscriber.subscribe(Target(name, one) for name, one in held.items())
        for step in (1, 2):
            _step(weights)
            assert publisher.publish(step, weights)
            publisher._finish_last()
            if step == 1:
                assert subscription.update() is not None
        with monkeypatch.context() as patch:
            # After the changes of some tensors were copied.
            patch.setattr(torch.Tensor, "copy_", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                subscription.update()
        update = subscription.update()
        assert update is not None and update.num_bytes_received == update.num_bytes
        assert all(torch.equal(held[name], weights[name]) for name in weights)
