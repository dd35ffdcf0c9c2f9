"""What all tests share: the worker pools, and an environment that asks no hub."""

import os
from collections.abc import Callable, Iterator

import pytest

from tests.pool import WorkerPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """World size -> the session's pool of that size."""
    made: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in made:
            made[world_size] = WorkerPool(world_size)
        return made[world_size]

    yield pool
    for existing in made.values():
        existing.close()
