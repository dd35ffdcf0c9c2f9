"""Randomness that does not depend on the rank.

Invariant: every random number that can change the mathematics is a pure function of the seed and
its purpose (a parameter's name and row block, a sample's index and position), so that no mesh,
resume or fault changes it. Numbers come from splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), which is a bijection of 64-bit integers and can be evaluated
at any position of its sequence.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def fold(seed: int, *parts: int | str) -> int:
    """Return a 64-bit key of `seed` and its purpose, the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *parts: int | str) -> torch.Generator:
    """Return a CPU generator keyed by `fold(seed, *parts)`. All draws are on the CPU, so that a
    GPU run starts from the same bits."""
    return torch.Generator().manual_seed(fold(seed, *parts) >> 1)


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 to an array of uint64, a bijection."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(_GOLDEN)) & np.uint64(_MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_tensor(x: torch.Tensor) -> torch.Tensor:
    """Apply `mix` to an int64 tensor (the same bits, read as signed), for draws inside a model."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniform(x: torch.Tensor) -> torch.Tensor:
    """Return mixed int64 keys as float32 in [0, 1), from their upper 24 bits."""
    return _shift(mix_tensor(x), 40).to(torch.float32) * 2.0**-24


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically: torch's `>>` on int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def seed_everything(seed: int) -> None:
    """Seed the global generators, for user code that draws from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Return the global generators' states as plain JSON values."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    # Only if this process already uses a GPU: querying the state would initialize CUDA.
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore(states: dict[str, Any]) -> None:
    """Restore what `capture` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]))


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
