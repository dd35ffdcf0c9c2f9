"""Devices, and results that are written as soon as they are known."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

Figure = Callable[[str, float, str], None]
"""Records a measured value: name, value, unit."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of a test that also runs on a CPU, as a rehearsal."""
    chosen = str(request.config.getoption("--gpu-device"))
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return chosen


@pytest.fixture
def cuda(device: str) -> str:
    """Return the device of a test that needs a GPU."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Return the memory that the allocator keeps: other processes use the same GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return the function that records a figure in `figures.jsonl` of the results."""

    def record(name: str, value: float, unit: str) -> None:
        line = {"test": request.node.nodeid, "figure": name, "value": value, "unit": unit}
        print(json.dumps(line))
        _append(request.config, "figures.jsonl", line)

    return record


class _Results:
    """Writes each test's outcome at once, because a run may be killed before its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            line = {
                "test": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "why": report.longreprtext[-4000:] if report.outcome != "passed" else "",
            }
            _append(self._config, "tests.jsonl", line)


def pytest_configure(config: pytest.Config) -> None:
    # The controller receives the outcomes of all workers.
    if config.getoption("--gpu-results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(config), "gpu results")


def _append(config: pytest.Config, name: str, line: dict[str, object]) -> None:
    given = config.getoption("--gpu-results")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        with (Path(given) / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
