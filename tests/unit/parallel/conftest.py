"""The mesh of one process."""

from collections.abc import Iterator

import pytest

from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started
