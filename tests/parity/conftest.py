"""Pools that the files of this folder share, because a worker's first job derives what the next
ones find."""

from collections.abc import Callable, Iterator

import pytest

from tests.harness.ranks import WorkerPool

_MAX_KEPT = 4
"""Larger pools end with their file: each worker costs memory, and its groups time."""


@pytest.fixture(scope="session")
def _kept_pools() -> Iterator[dict[int, WorkerPool]]:
    kept: dict[int, WorkerPool] = {}
    yield kept
    for pool in kept.values():
        pool.close()


@pytest.fixture(scope="module")
def pools(_kept_pools: dict[int, WorkerPool]) -> Iterator[Callable[[int], WorkerPool]]:
    """Return a function that returns the pool of a world size, in a world of this file."""
    used: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in used:
            kept = _kept_pools if world_size <= _MAX_KEPT else used
            used[world_size] = kept.setdefault(world_size, WorkerPool(world_size))
        return used[world_size]

    yield pool
    for world_size, pool_of_size in used.items():
        if world_size <= _MAX_KEPT:
            pool_of_size.renew()
        else:
            pool_of_size.close()
