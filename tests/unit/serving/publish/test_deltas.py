"""A shard and its delta give exactly the later shard, in whatever part and dtype it is held."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.unit.serving.publish.conftest import Publish, complete, remote_subscriber
from torchtitan_lite.checkpoint import tensor_bytes
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY, HeldTensor
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.redistribute.execution.program import RAW_DTYPES
from torchtitan_lite.serving.publish import Target, deltas
from torchtitan_lite.serving.publish.deltas import (
    Delta,
    DeltaHistory,
    DeltaLink,
    chain_from,
    encode_delta,
)

_DTYPES = [
    torch.float64, torch.complex64, torch.float32, torch.uint32, torch.bfloat16, torch.float16,
    torch.float8_e4m3fn, torch.uint8, torch.bool,
]  # fmt: skip
needs_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


def _changed(old: torch.Tensor, positions: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return a copy with other bits at these positions."""
    new = old.clone()
    raw = new.view(-1).view(RAW_DTYPES[old.dtype.itemsize])
    raw[torch.as_tensor(positions)] ^= 1
    return new


def _encode(old: torch.Tensor, new: torch.Tensor) -> bytes | None:
    return encode_delta(tensor_bytes(old), tensor_bytes(new), old.dtype.itemsize)


def _num_bytes(shard: torch.Tensor, count: int) -> int:
    """Return the size of a delta of `count` elements."""
    return 4 * -(-shard.numel() // 65_536) + count * (shard.itemsize + 2)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = RAW_DTYPES[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(raw), other.view(raw))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(70_001,), (3000, 1000), (5, 200, 70)])
def test_any_block_of_a_shard_is_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draws = random.Random(f"{dtype} {shape}")
    generator = torch.Generator().manual_seed(len(shape))
    size = torch.Size(shape).numel()
    old = torch.randint(0, 2, shape, generator=generator).to(dtype)
    # The first and the last element, and both sides of a block of positions.
    positions = torch.randint(0, size, (size // 50,), generator=generator)
    positions = torch.cat([positions, torch.tensor([0, 65_535, 65_536, size - 1])]).unique()
    new = _changed(old, positions)
    raw = _encode(old, new)
    assert raw is not None and len(raw) == _num_bytes(old, len(positions))
    # In a buffer, elements may be unaligned.
    delta = Delta(memoryview(b"." + raw)[1:], shape, dtype)
    for number in range(20):
        starts = [draws.randrange(dim) if number else 0 for dim in shape]
        stops = [
            draws.randint(start, dim) if number % 4 else dim
            for start, dim in zip(starts, shape, strict=True)
        ]
        # Of every fifth block all rows are whole.
        first = 1 if number % 5 == 0 else len(shape)
        spans = [*zip(starts, stops, strict=True)][:first] + [(0, dim) for dim in shape[first:]]
        block = tuple(slice(*span) for span in spans)
        held = old[block].clone()
        if number % 3 == 1:
            held = torch.stack([held, held], -1)[..., 0]
        elif number % 3 == 2:
            held = held.mT.contiguous().mT if len(shape) > 1 else held
        delta.apply_to(held, block)
        assert _equal(held, new[block])


def test_bits_are_compared_and_not_values() -> None:
    old = torch.zeros(1000)
    old[:2] = torch.nan
    new = old.clone()
    new[1], new[2] = -torch.nan, -0.0
    raw = _encode(old, new)
    assert raw is not None and len(raw) == _num_bytes(old, 2)
    delta = Delta(memoryview(raw), (1000,), torch.float32)
    delta.apply_to(old, [slice(0, 1000)])
    assert _equal(old, new)


@pytest.mark.matrix
def test_many_changes_have_no_delta() -> None:
    # Over several chunks of the comparison, the limit is one of the whole shard.
    old = torch.zeros(1 << 23, dtype=torch.bfloat16)
    assert _encode(old, _changed(old, range(0, 1 << 23, 4))) is None
    few = _encode(old, _changed(old, range(0, 1 << 23, 5)))
    assert few is not None and len(few) < old.nbytes / 2
    assert _encode(torch.zeros(1), torch.ones(1)) is None


@pytest.mark.parametrize(
    ("positions", "change", "problem"),
    [
        ([3, 7], lambda raw: raw[:-1], "12 bytes|bytes are no delta"),
        ([3, 7], lambda raw: raw[:3], "3 bytes are no delta"),
        ([3, 7], lambda raw: b"\7" + raw[1:], "has 2 elements, and counts 7"),
        # The last three are in the second block, which has 1,000 elements.
        ([3, 65_540, 65_542], lambda raw: raw[:-2] + b"\xe8\3", "exceed shape"),
        ([3, 65_540], lambda raw: raw[:-2] + b"\xe8\3", "exceed shape"),
        ([3, 65_540, 65_542], lambda raw: raw[:-4] + raw[-2:] + raw[-4:-2], "do not increase"),
        ([3, 65_540, 65_542], lambda raw: raw[:-2] + raw[-4:-2], "do not increase"),
        ([3, 7, 65_540], lambda raw: raw[:-6] + raw[-4:-2] + raw[-6:-4] + raw[-2:], "not increase"),
    ],
)
def test_damaged_deltas_are_rejected(positions: list[int], change: Any, problem: str) -> None:
    old = torch.zeros(66_536)
    raw = _encode(old, _changed(old, positions))
    assert raw is not None
    Delta(memoryview(raw), old.shape, old.dtype)
    # The last position of a block may be above the first one of the next.
    with pytest.raises(PublishError, match=problem):
        Delta(memoryview(change(raw)), old.shape, old.dtype)
    for shape in ((), (0,)):
        with pytest.raises(PublishError, match="are no delta of shape"):
            Delta(memoryview(raw), shape, old.dtype)


@pytest.mark.parametrize("given", [None, 7, ["a", 1], [1, 2, 3], ["a", -1, 2], ["a", 1, 2.5]])
def test_damaged_links_are_rejected(given: Any) -> None:
    with pytest.raises(PublishError, match="does not describe a delta"):
        DeltaLink.from_json(given)
    assert DeltaLink.from_json(["a", 0, 2]) == DeltaLink(base="a", offset=0, num_bytes=2)


def test_chains_pass_over_versions_that_do_not_change_a_shard() -> None:
    shard = torch.zeros(1000)
    held = HeldTensor(
        name="a",
        layout=0,
        shape=(1000,),
        local_shape=(1000,),
        dtype="F32",
        offset=0,
        bytes=shard.nbytes,
    )
    history = DeltaHistory(3)
    versions = [shard]
    for position in (1, None, 3, 4):
        versions.append(versions[-1] if position is None else _changed(versions[-1], [position]))
    names = ["zero", "one", "one", "three", "four"]
    for (old, new), (base, digest) in zip(pairwise(versions), pairwise(names), strict=True):
        history.add([held], tensor_bytes(old), tensor_bytes(new), {"a": base}, {"a": digest})
    chains = history.chains({"a": "four"}, 100)
    # The first version is not kept any more.
    assert [link.base for link in chains["a"]] == ["three", "one"]
    encoded = bytes(100) + b"".join(history.encoded())
    chain = chain_from("one", chains["a"])
    assert len(chain) == 2 and chain_from("zero", chains["a"]) == []
    received = versions[1].clone()
    for link in chain:
        raw = memoryview(encoded)[link.offset : link.offset + link.num_bytes]
        Delta(raw, (1000,), torch.float32).apply_to(received, [slice(0, 1000)])
    assert _equal(received, versions[-1])
    assert history.chains({"a": "five"}, 100) == {}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (300, 500), "experts": (6, 100, 50), "norm": (8,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _step(weights: dict[str, torch.Tensor], step: int, *, every: int = 100) -> None:
    """Change every `every`th element, others in each step, and all of the norm."""
    for name, one in weights.items():
        if name == "norm":
            one.add_(1)
        else:
            one.copy_(_changed(one, range(step % every, one.numel(), every)))


@needs_shared_memory
def test_subscribers_receive_changes_only(
    publish: Publish, port: int, weights: dict[str, torch.Tensor]
) -> None:
    # A server counts a version as being read for a moment.
    settings = {"keep_versions": 3, "when_in_use": "wait"}
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True, **settings)

    complete(publisher, 1, weights)
    columns = Layout(HolderMesh.ranks(2), [Shard(1)])
    fused = torch.zeros(300, 600)
    expert = torch.zeros(100, 50, dtype=torch.bfloat16)
    quantized = torch.zeros(6, 100, 50, dtype=torch.float8_e4m3fn)
    norm = torch.zeros(8)
    with remote_subscriber(port) as subscriber:
        subscription = subscriber.subscribe(
            [
                Target("w", fused[:, 100:350], columns, 1),
                Target("experts", expert, row=4),
                Target("experts", quantized),
                Target("norm", norm),
            ]
        )

        def receive() -> float:
            """Receive the newest version, and return the share of bytes."""
            update = subscription.update()
            assert update is not None and update.num_bytes_unchanged == 0
            assert torch.equal(fused[:, 100:350], weights["w"][:, 250:])
            assert not fused[:, :100].any() and not fused[:, 350:].any()
            assert torch.equal(expert, weights["experts"][4].bfloat16())
            assert _equal(quantized, weights["experts"].to(torch.float8_e4m3fn))
            assert torch.equal(norm, weights["norm"])
            return update.num_bytes_received / update.num_bytes

        assert receive() == 1
        _step(weights, 2)
        complete(publisher, 2, weights)
        one = receive()
        assert 0.01 < one < 0.03
        # One that has missed versions receives the changes of all of them, as far as they are kept.
        for step in (3, 4, 5):
            _step(weights, step)
            complete(publisher, step, weights)
        assert one * 2.5 < receive() < one * 3.5
        for step in (6, 7, 8, 9):
            _step(weights, step)
            complete(publisher, step, weights)
        assert receive() == 1
        # With a version of many changes, the chain ends.
        for step, every in ((10, 100), (11, 2), (12, 100)):
            _step(weights, step, every=every)
            complete(publisher, step, weights)
        assert receive() == 1


@needs_shared_memory
def test_deltas_larger_than_a_block_are_not_received(
    publish: Publish, port: int, weights: dict[str, torch.Tensor]
) -> None:
    weights = {"experts": weights["experts"]}
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True)
    expert = torch.zeros(100, 50)
    with remote_subscriber(port) as subscriber:
        subscription = subscriber.subscribe([Target("experts", expert, row=4)])
        for step, every, is_delta in ((1, 100, False), (2, 8, False), (3, 10, True)):
            _step(weights, step, every=every)
            complete(publisher, step, weights)
            update = subscription.update()
            assert update is not None and torch.equal(expert, weights["experts"][4])
            # The delta of all six experts is between 0.9 and 1.2 times one of them.
            assert (update.num_bytes_received < update.num_bytes) is is_delta
            assert publisher._deltas is not None
            sizes = [len(encoded) / expert.nbytes for encoded in publisher._deltas.encoded()]
            assert all(0.8 < size < 1.2 for size in sizes) and len(sizes) == min(2, step - 1)


@needs_shared_memory
def test_without_memory_for_deltas_shards_are_served(
    publish: Publish,
    port: int,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True)
    with remote_subscriber(port) as subscriber:
        held = {name: torch.zeros_like(one) for name, one in weights.items()}
        subscription = subscriber.subscribe(Target(name, one) for name, one in held.items())
        for step, is_full in ((1, False), (2, True), (3, False)):
            _step(weights, step)
            with monkeypatch.context() as patch:
                if is_full:
                    patch.setattr(deltas, "encode_delta", _no_memory)
                complete(publisher, step, weights)
            update = subscription.update()
            assert update is not None
            assert all(torch.equal(held[name], weights[name]) for name in weights)
            assert (update.num_bytes_received == update.num_bytes) is (step < 3)
    (warning,) = logged.messages
    assert "Version 2 is served without deltas: rank 0: MemoryError()" in warning


def _no_memory(*_: Any) -> bytes:
    raise MemoryError


class _Quantized(torch.Tensor):
    """A tensor that receives values by its own `copy_`."""


@needs_shared_memory
def test_tensors_of_other_types_receive_shards(
    publish: Publish, port: int, weights: dict[str, torch.Tensor]
) -> None:
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True)
    held = torch.zeros_like(weights["w"]).as_subclass(_Quantized)
    with remote_subscriber(port) as subscriber:
        subscription = subscriber.subscribe([Target("w", held)])
        for step in (1, 2):
            _step(weights, step)
            complete(publisher, step, weights)
            update = subscription.update()
            assert update is not None and update.num_bytes_received == update.num_bytes
            assert torch.equal(held, weights["w"])


@needs_shared_memory
def test_after_a_failed_copy_shards_are_received(
    publish: Publish,
    port: int,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = publish(weights, address="127.0.0.1", port=port, deltas=True)
    held = {name: torch.zeros_like(one) for name, one in weights.items()}
    with remote_subscriber(port) as subscriber:
        subscription = subscriber.subscribe(Target(name, one) for name, one in held.items())
        for step in (1, 2):
            _step(weights, step)
            complete(publisher, step, weights)
            if step == 1:
                assert subscription.update() is not None
        with monkeypatch.context() as patch:
            # The norm has no delta. It comes after the deltas of other tensors.
            patch.setattr(torch.Tensor, "copy_", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                subscription.update()
        assert subscription.version is None
        update = subscription.update()
        assert update is not None and update.num_bytes_received == update.num_bytes
        assert all(torch.equal(held[name], weights[name]) for name in weights)
