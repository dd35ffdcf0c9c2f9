"""What all tests share: the worker pools, and an environment that asks no hub."""

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.failures import RankFailed, note_failure
from tests.pool import WorkerPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts a background command with SIGINT ignored, and processes of tests would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on each run; and a slow machine is no fault of theirs.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run the tests of shard K of N (from 0) only")
    parser.addoption(
        "--budget-s", type=float, help="skip the tests that begin after so many seconds"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("--shard")
    if shard is not None:
        number, _, count = shard.partition("/")
        number, count = int(number) % int(count), int(count)
        chosen, others = [], []
        for item in items:
            # By test: a shard of files could have one with hundreds of slow tests.
            is_chosen = zlib.crc32(item.nodeid.encode()) % count == number
            (chosen if is_chosen else others).append(item)
        items[:] = chosen
        config.hook.pytest_deselected(items=others)


_BEGAN_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--budget-s")
    if budget_s is not None and time.monotonic() - _BEGAN_S > budget_s:
        pytest.skip(f"the time budget of {budget_s:g} s is used up")


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """World size -> the pool of that size for the tests of a file."""
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
