"""Peak memory: live tensors on a CPU, the allocator's statistics on a GPU."""

from dataclasses import dataclass, field
from typing import cast

import torch

from torchtitan_lite.distributed.device import Device, detect_device
from torchtitan_lite.training.debug.memory import LiveTensors, ModulePeaks


def _bytes(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8)


def test_live_tensors_are_counted_until_they_are_freed() -> None:
    live = LiveTensors([_kept := _bytes(100)])
    first = _bytes(10)
    live.note([first, first[:5]])
    second = _bytes(7)
    live.note({"result": second})
    del second
    third = _bytes(3)
    live.note(third)
    assert live.take_peak() == 117
    assert live.take_peak() == 113
    del first, third, _kept
    assert live.take_peak() == 113
    assert live.take_peak() == 0


def test_a_storage_that_is_resized_in_place_is_measured_again() -> None:
    live = LiveTensors([weights := _bytes(100)])
    weights.untyped_storage().resize_(0)
    live.measure_again()
    live.take_peak()
    assert live.take_peak() == 0
    weights.untyped_storage().resize_(50)
    assert live.take_peak() == 50


def test_a_module_includes_its_children() -> None:
    peaks = ModulePeaks(detect_device("cpu"), [_kept := _bytes(100)])
    peaks.at("layers.0.attention", "forward")
    held = _bytes(30)
    peaks.note(held)
    peaks.at("layers.0", "forward")
    del held
    peaks.at("layers.0", "backward")
    peaks.note(_bytes(5))
    peaks.close()
    names = ["model", "layers.0", "layers.0.attention", "norm"]
    assert peaks.by_module(names, root="model") == {
        "model": {"forward": 130, "backward": 105},
        "layers.0": {"forward": 130, "backward": 105},
        "layers.0.attention": {"forward": 130},
    }


@dataclass
class _Allocator:
    """A device whose allocator reports these peaks, in order."""

    peaks: list[int] = field(default_factory=list)
    has_allocator_peak = True

    def take_allocator_peak(self) -> int:
        return self.peaks.pop(0)


def test_on_a_gpu_the_allocator_reports() -> None:
    device = _Allocator(peaks=[1000, 7, 9, 8, 6])
    peaks = ModulePeaks(cast(Device, device), [_bytes(100)])
    peaks.at("norm", "forward")
    peaks.note(_bytes(50))
    peaks.at("output", "forward")
    peaks.at("norm", "forward")
    peaks.close()
    assert peaks.by_module(["norm", "output"], root="model") == {
        "norm": {"forward": 9},
        "output": {"forward": 8},
    }
