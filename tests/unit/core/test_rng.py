"""Keyed randomness."""

import json
import random

import numpy as np
import torch

from torchtitan_lite.core import rng


def test_a_key_is_the_same_on_every_machine_and_release() -> None:
    assert rng.fold(0, "init", "tok_embeddings.weight", 3) == 2308333235006636615


def test_every_part_of_a_key_matters() -> None:
    keys = {
        rng.fold(0), rng.fold(1), rng.fold(0, 1), rng.fold(0, "a"), rng.fold(0, "a", 1),
        rng.fold(0, 1, "a"), rng.fold(0, "a1"), rng.fold(1, "a"),
    }  # fmt: skip
    assert len(keys) == 8


def test_numpy_and_torch_mix_equally() -> None:
    edges = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    inputs = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)])
    mixed = rng.mix_tensor(torch.from_numpy(inputs.view(np.int64)))
    assert (mixed.numpy().view(np.uint64) == rng.mix(inputs)).all()


def test_mix_is_the_published_splitmix64() -> None:
    # The first outputs of the reference implementation for the state 1234567.
    state = np.uint64(1234567)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        states = np.array([state, state + golden, state + golden + golden])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert rng.mix(states).tolist() == expected


def test_uniform_fills_the_unit_interval_evenly() -> None:
    drawn = rng.uniform(torch.arange(-50_000, 50_000))
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, bins=10, min=0, max=1)
    # 10,000 per bin, with a standard deviation of 95.
    assert (counts - 10_000).abs().max() < 500
    neighbours = torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1]
    assert neighbours.abs() < 0.02


def test_uniform_never_reaches_one() -> None:
    # Invert the finalizer for all bits set: the largest possible output.
    x = 2**64 - 1
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    x ^= (x >> 30) ^ (x >> 60)
    key = np.array([(x - 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64)
    assert rng.mix(key)[0] == 2**64 - 1
    assert 0.9999 < rng.uniform(torch.from_numpy(key.view(np.int64))).item() < 1


def test_ambient_generators_continue_from_their_captured_state() -> None:
    before = rng.capture()
    try:
        rng.seed_everything(5)
        random.gauss(0, 1)  # Leaves a second draw behind, which is part of the state.
        np.random.standard_normal()
        torch.rand(3)
        state = json.loads(json.dumps(rng.capture()))
        expected = _draw()
        assert _draw() != expected
        rng.restore(state)
        assert _draw() == expected
    finally:
        rng.restore(before)


def test_seeding_accepts_larger_numbers_than_numpy() -> None:
    before = rng.capture()
    try:
        rng.seed_everything(2**40 + 3)
        first = _draw()
        rng.seed_everything(2**40 + 3)
        assert _draw() == first
    finally:
        rng.restore(before)


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        *torch.rand(2).tolist(),
    ]
