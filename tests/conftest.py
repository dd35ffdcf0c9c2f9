"""What all tests share: the worker pools, and an environment that asks no hub."""

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.failures import RankFailed, note_failure
from tests.pool import WorkerPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on each run; and a slow machine is no fault of theirs.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note the log of the rank that failed a test; a failure that a test expects is none."""
    yield
    if call.excinfo is not None and isinstance(call.excinfo.value, RankFailed):
        note_failure(call.excinfo.value.log)
