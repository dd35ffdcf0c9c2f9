"""Fixtures of all unit tests. Flavors that a test registers do not outlive it."""

from collections.abc import Iterator

import pytest

from torchtitan_lite.device import detect_device
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.models import families, family
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig


@pytest.fixture(autouse=True)
def own_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in families():
        module = family(name)
        monkeypatch.setattr(module, "FLAVORS", dict(module.FLAVORS))


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Collect the records of the project's logger, which does not propagate to the root."""
    propagate = logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate
