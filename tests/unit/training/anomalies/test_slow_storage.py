"""A rank whose storage is slow is named, and a single slow write is not."""

from collections import deque

import numpy as np

from torchtitan_lite.training.anomalies.slow_storage import _NOISE_S as NOISE_S
from torchtitan_lite.training.anomalies.slow_storage import _NOT_SLOW as NOT_SLOW
from torchtitan_lite.training.anomalies.slow_storage import _SLOW as SLOW
from torchtitan_lite.training.anomalies.slow_storage import SlowStorageDetector


def _found(
    writes_s: np.ndarray, num_bytes: tuple[float, ...] | None = None
) -> list[tuple[int, int]]:
    """Return (write, rank) of what is found in writes [writes, ranks], which ranks end at different
    steps. `num_bytes` are those of each rank; if omitted, equal ones."""
    sizes = num_bytes or (1e6,) * writes_s.shape[1]
    detector, found = SlowStorageDetector(), []
    last = {(0, rank): (0.0, 0.0) for rank in range(writes_s.shape[1])}
    for number, row in enumerate(writes_s):
        for rank, seconds in enumerate(row):
            last[0, rank] = float(seconds), sizes[rank]
            for _ in range(3):
                found += [(number, rank) for (_, rank), _ in detector.step(last)]
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


def test_ranks_that_write_more_or_less_than_others_are_not_slow() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.1, (40, 4)))
    # A rank with most of the bytes, and one whose few bytes take as long as a sync does.
    assert _found(noise * [1.0, 1.0, 8.0, 1.0], (1e9, 1e9, 8e9, 1e9)) == []
    assert _found(noise * [1.0, 1.0, 0.8, 1.0], (1e9, 1e9, 1e3, 1e9)) == []
    assert _found(noise * [1.0, 1.0, 8.0, 1.0], (1e9,) * 4)[0] == (3, 2)


def test_writes_belong_to_ranks_and_not_to_their_places_in_the_quorum() -> None:
    detector, slow = SlowStorageDetector(), (1, 0)

    def writes(
        number: int, replicas: tuple[int, ...]
    ) -> dict[tuple[int, int], tuple[float, float]]:
        return {(one, 0): (0.1 + 2.0 * ((one, 0) == slow) + number * 1e-6, 1e6) for one in replicas}

    found = [rank for number in range(6) for rank, _ in detector.step(writes(number, (0, 1, 2)))]
    assert found == [slow]
    # Another replica leaves and returns, and all have other places.
    found = [rank for number in range(6, 12) for rank, _ in detector.step(writes(number, (1, 2)))]
    found += [
        rank for number in range(12, 18) for rank, _ in detector.step(writes(number, (2, 0, 1)))
    ]
    assert found == []


def test_a_replica_that_joins_late_is_named_as_early_as_others() -> None:
    detector, slow = SlowStorageDetector(), (3, 0)

    def observe(number: int, num_replicas: int) -> list[tuple[int, int]]:
        ranks = [(one, 0) for one in range(num_replicas)]
        writes = {rank: (0.1 + 2.0 * (rank == slow) + number * 1e-6, 1e6) for rank in ranks}
        return [rank for rank, _ in detector.step(writes)]

    assert not any(observe(number, 3) for number in range(20))
    # The newest writes of the others were observed before.
    assert [observe(number, 4) for number in range(19, 25)] == [[], [], [], [], [slow], []]


def test_storage_is_slow_from_a_limit_on_until_it_is_below_another_one() -> None:
    detector = SlowStorageDetector()

    def write(own_s: float, others_s: float = 0.5) -> list[int]:
        """Return the slow ranks after some writes of rank 0, and of two others."""
        seconds = {(0, 0): own_s, (0, 1): others_s, (0, 2): others_s}
        detector._writes = {rank: deque([(one, one)] * 4) for rank, one in seconds.items()}
        return [rank for (_, rank), _ in detector._changes()]

    assert write(SLOW * 0.499) == []
    assert write(SLOW * 0.5) == [0]
    assert write(NOT_SLOW * 0.5) == [] and write(SLOW * 0.5) == [], "it still is slow"
    assert write(NOT_SLOW * 0.499) == [] and write(SLOW * 0.5) == [0]
    assert write(0.0) == [] and write(1.0 + NOISE_S, 1.0) == []
    noise_of_a_disk = NOISE_S / (SLOW - 1)
    assert write(noise_of_a_disk * SLOW * 0.999, noise_of_a_disk) == []
    assert write(noise_of_a_disk * SLOW, noise_of_a_disk) == [0]
