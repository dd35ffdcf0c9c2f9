"""A process that cannot open anything says so at once."""

import os
import resource

import pytest

from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.descriptors import check_descriptors


def test_a_process_without_descriptors_leaves() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(ReplicaError, match=r"Too many open files.*ulimit -n"):
            check_descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    check_descriptors()
    assert len(os.listdir("/proc/self/fd")) == before
