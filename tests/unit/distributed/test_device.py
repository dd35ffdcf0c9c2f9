"""Consequences of the device type."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.distributed.device import detect_device, have_peer_access


def test_the_cpu_needs_nothing() -> None:
    device = detect_device("cpu")
    assert device.kind == "cpu" and device.backend == "gloo"
    assert device.peak_flops is None and not device.pin_memory
    assert 0.01 < device.peak_memory_gib() < psutil.virtual_memory().total / 2**30


_STARTER = """
import subprocess, sys
held = b"x" * (1 << 30)
print(subprocess.check_output([sys.executable, "-c", sys.argv[1]], text=True))
"""
_STARTED = """
from torchtitan_lite.distributed.device import *
print(detect_device('cpu').peak_memory_gib())
"""


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts so")
def test_peak_memory_excludes_that_of_the_parent_process() -> None:
    path = os.pathsep.join(sys.path)
    output = subprocess.check_output(
        [sys.executable, "-c", _STARTER, _STARTED],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    assert 0.05 < float(output) < 0.9


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_rejected_and_never_selected_automatically() -> None:
    assert detect_device("auto").kind == "cpu"
    with pytest.raises(UserError, match=r'the node has 0\. .* \[job\] device = "cpu"'):
        detect_device("cuda")


def _show_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int) -> None:
    """Stand in for the driver: `number` GPUs, which CUDA_VISIBLE_DEVICES names as `visible`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(("visible", "number", "index"), [("3", 1, 0), ("2,3", 2, 1), (None, 2, 1)])
def test_a_process_uses_the_one_gpu_that_its_scheduler_shows_it(
    visible: str | None, number: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _show_gpus(monkeypatch, visible, number)
    assert detect_device("cuda").torch_device == torch.device("cuda", index)


def test_a_node_with_fewer_gpus_than_processes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _show_gpus(monkeypatch, None, 1)
    with pytest.raises(UserError, match="Process 1 of this node needs a GPU of its own"):
        detect_device("cuda")


def test_the_peak_of_memory_needs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> str:
        raise OSError(errno.EMFILE, str(path))

    monkeypatch.setattr(Path, "read_text", failing)
    assert 0.01 < detect_device("cpu").peak_memory_gib() < 1000


def test_every_gpu_must_reach_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    reached = {1}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other in reached)
    assert not have_peer_access()
    reached.add(2)
    assert have_peer_access()


def test_the_peak_of_the_allocator_is_that_since_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"cuda:0": 7}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({str(device): 0})
    )
    device = replace(detect_device("cpu"), torch_device=torch.device("cuda:0"))
    assert [device.take_allocator_peak() for _ in range(2)] == [7, 0]
