"""What follows from the kind of device."""

import psutil
import pytest
import torch

from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError


def test_the_cpu_needs_nothing() -> None:
    device = detect_device("cpu")
    assert device.kind == "cpu" and device.backend == "gloo"
    assert device.peak_flops is None and not device.pin_memory
    assert 0.01 < device.peak_memory_gib() < psutil.virtual_memory().total / 2**30


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_and_never_taken_by_itself() -> None:
    assert detect_device("auto").kind == "cpu"
    with pytest.raises(UserError, match=r'the node has 0\. .* \[job\] device = "cpu"'):
        detect_device("cuda")
