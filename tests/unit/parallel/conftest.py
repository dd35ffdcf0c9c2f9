"""The mesh of one process."""

from collections.abc import Iterator

import pytest

from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import CommConfig, Mesh, ParallelismConfig, start_mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started
