"""Fixtures for runs with spares."""

from collections.abc import Iterator

import pytest

from tests.resilience.spared_run import SparedRun


@pytest.fixture
def runs() -> Iterator[list[SparedRun]]:
    """Runs that end with the test."""
    started: list[SparedRun] = []
    yield started
    for run in started:
        run.end()
