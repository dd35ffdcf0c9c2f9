"""Pools that the files of this folder share, because a worker's first job derives what the next
ones find; and the outcome of one process."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import REFERENCE

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


@pytest.fixture(scope="module")
def reference(
    pools: Callable[[int], WorkerPool], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    """Return a function that maps overrides to the outcome of one process, computed once."""
    folder = tmp_path_factory.mktemp("reference")

    @cache
    def run(overrides: tuple[tuple[str, Any], ...]) -> Outcome:
        name = str(abs(hash(overrides)))
        return pools(1).run(run_job, folder / name, {**REFERENCE, **dict(overrides)})[0]

    return lambda **overrides: run(tuple(sorted(overrides.items())))
