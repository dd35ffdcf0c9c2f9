"""Fixtures and options of all tests: worker pools, shards, and an environment without hub
access."""

import gc
import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.harness.ranks import RankFailed, WorkerPool, record_failure
from torchtitan_lite.core.log import logger

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background commands with SIGINT ignored, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Same examples in each run; no failures because the machine is slow.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run only the tests of shard K of N (from 0)")
    parser.addoption(
        "--budget-s", type=float, help="skip the tests that would start after this time in seconds"
    )
    parser.addoption(
        "--gpu-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of tests/gpu; cpu: rehearse those that run without a GPU",
    )
    parser.addoption("--gpu-results", help="folder that gets the results of tests/gpu at once")


_PARITY = "tests/parity/"


class _Scheduler(LoadFileScheduling):
    """Gives whole files to the processes, and all files of the parity tests to the same one, which
    starts their pools once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _PARITY if file.startswith(_PARITY) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _Scheduler(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("--shard")
    if shard is not None:
        number, _, count = shard.partition("/")
        number, count = int(number) % int(count), int(count)
        chosen, others = [], []
        for item in items:
            # Per test: a file may have hundreds of slow tests.
            is_chosen = zlib.crc32(item.nodeid.encode()) % count == number
            (chosen if is_chosen else others).append(item)
        items[:] = chosen
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and tests from garbage collections: many tests collect explicitly, and each
    collection would visit a million of their objects."""
    gc.collect()
    gc.freeze()


_STARTED_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--budget-s")
    if budget_s is not None and time.monotonic() - _STARTED_S > budget_s:
        pytest.skip(f"the time budget of {budget_s:g} s is used up")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a command that runs in this process does to the logger ends with its test."""
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """Return a function that returns the pool of a world size, shared by the tests of a file."""
    existing: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in existing:
            existing[world_size] = WorkerPool(world_size)
        return existing[world_size]

    yield pool
    for one in existing.values():
        one.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the log of the rank that failed a test, unless the test expects the failure."""
    yield
    if call.excinfo is not None and isinstance(call.excinfo.value, RankFailed):
        record_failure(call.excinfo.value.log)
