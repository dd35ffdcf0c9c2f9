"""A rank whose storage is slow is named, and a single slow write is not."""

import numpy as np

from torchtitan_lite.anomalies.slow_storage import SlowStorageDetector


def _found(writes_s: np.ndarray) -> list[tuple[int, int]]:
    """Return (write, rank) of what is found in writes [writes, ranks], which ranks end at different
    steps."""
    detector, last, found = SlowStorageDetector(), [0.0] * writes_s.shape[1], []
    for number, row in enumerate(writes_s):
        for rank, seconds in enumerate(row):
            last[rank] = float(seconds)
            for _ in range(3):
                found += [(number, place) for place, _ in detector.step(last)]
    return found


def test_a_slow_rank_is_named_once_until_it_is_fast_again() -> None:
    writes = 0.05 * np.exp(np.random.default_rng(0).normal(0, 0.5, (40, 4)))
    writes[10:20, 2] += 0.6
    writes[25:35, 2] += 0.6
    assert _found(writes) == [(13, 2), (28, 2)]


def test_noise_and_short_differences_name_nobody() -> None:
    for seed in range(20):
        noise = np.random.default_rng(seed)
        writes = 0.2 * np.exp(noise.normal(0, 0.5, (200, 4)))
        # A disk that is busy for one write.
        writes[noise.random((200, 4)) < 0.05] += 2
        assert _found(writes) == []
    # Five times as long, but milliseconds.
    assert _found(np.tile([0.01, 0.01, 0.05, 0.01], (20, 1)) + np.arange(20)[:, None] * 1e-6) == []


def test_one_rank_has_nobody_to_compare_with() -> None:
    assert _found(np.arange(1.0, 20.0)[:, None]) == []
