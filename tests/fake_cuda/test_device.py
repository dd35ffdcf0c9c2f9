"""The detectors of the simulated device: each finds a planted wait."""

from collections.abc import Callable

import pytest
import torch

from tests.fake_cuda.device import FakeDevice
from tests.harness.ranks import exit_status
from torchtitan_lite.distributed.torch_compat import foreach_copy_

_CPU = torch.arange(4)


def _device() -> torch.Tensor:
    return torch.arange(4, device="cuda")


WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: _device()[0].item(),
    "tolist": lambda: _device().tolist(),
    "to host": lambda: _device().cpu(),
    "to device": lambda: _CPU.to("cuda"),
    "new on device": lambda: torch.tensor([1.0], device="cuda"),
    "copy": lambda: _CPU.clone().copy_(_device()),
    "foreach copy": lambda: foreach_copy_([_CPU.clone()], [_device()]),
    "index on the host": lambda: _device()[_CPU],
    "event": lambda: torch.cuda.Event().synchronize(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
    "device": lambda: torch.cuda.synchronize(),
}
ASYNCHRONOUS: dict[str, Callable[[], object]] = {
    "to host": lambda: _device().to("cpu", non_blocking=True),
    "to device": lambda: _CPU.to("cuda", non_blocking=True),
    "filled": lambda: torch.full((), 2.0, device="cuda"),
    "index": lambda: _device()[_device()],
    "known size": lambda: _device().repeat_interleave(_device(), output_size=6),
    "copy": lambda: foreach_copy_([_CPU.clone()], [_device()], non_blocking=True),
}
MIXED: dict[str, Callable[[], object]] = {
    "sum": lambda: _device() + _CPU,
    "in place": lambda: _CPU.clone().add_(_device()),
}


def _count(name: str, group: str) -> None:
    device = FakeDevice(lambda tensor, frame: None)
    with device.running():
        if group == "mixed":
            with pytest.raises(Exception, match="device"):
                MIXED[name]()
        elif group == "waits":
            WAITS[name]()
            assert device.waits.total() == 1, device.waits
        else:
            ASYNCHRONOUS[name]()
            assert not device.waits, device.waits


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted(name: str) -> None:
    assert exit_status(_count, name, "waits") == 0


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_work_is_no_wait(name: str) -> None:
    assert exit_status(_count, name, "asynchronous") == 0


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_raise(name: str) -> None:
    assert exit_status(_count, name, "mixed") == 0
