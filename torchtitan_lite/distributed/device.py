"""Properties of the device kind.

Other code uses these and never checks for CUDA itself.
"""

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from torchtitan_lite.core.errors import UserError

LOGITS_PER_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}
"""By kind of device. On a GPU a chunk must be large enough for fast matrix products; 2**28 logits
are 1 GiB in float32."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of this process."""

    torch_device: torch.device
    backend: str
    """torch.distributed backend; gloo is always available for CPU tensors too."""
    pin_memory: bool
    fused_optimizer: bool
    peak_flops: float | None
    """Dense bf16 FLOP/s of one device; None if unknown (every CPU)."""

    @property
    def kind(self) -> str:
        """Return "cpu" or "cuda"."""
        return self.torch_device.type

    def peak_memory_gib(self) -> float:
        """Return the peak since the start: of the allocator on a GPU, of the process on a CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_reserved() / 2**30
        return _peak_resident_kib() / 2**20

    def free_memory_bytes(self) -> int:
        """Return the memory that this process can still allocate: on a GPU what is free beside the
        allocator's cache, which the activations of the next step need again; on a CPU its part of
        what this machine has available."""
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.torch_device)[0]
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return psutil.virtual_memory().available // num_local

    @property
    def uuid(self) -> str:
        """Identity of the GPU among all GPUs; empty on a CPU."""
        if self.kind != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    @property
    def logits_per_chunk(self) -> int:
        """Return the logits that the loss computes at a time."""
        return LOGITS_PER_CHUNK[self.kind]

    @property
    def has_allocator_peak(self) -> bool:
        """Whether `take_allocator_peak` is supported."""
        return self.kind == "cuda"

    def take_allocator_peak(self) -> int:
        """Return the peak of the allocator since the last call, in bytes; on a GPU only."""
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return peak


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Figures of a kind of GPU, from its data sheet."""

    names: tuple[str, ...]
    """Parts of the device's name; the first accelerator with a part in it applies."""
    peak_flops: float
    """Dense bf16 FLOP/s."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of a node, in one direction: NVLink, or PCIe without it."""
    network_bytes_per_s: float = 50e9
    """Bandwidth to other nodes, per GPU: 400 Gb/s, a property of the machine, not of the GPU."""
    per_node: int = 8


ACCELERATORS = {
    "h100-nvl": Accelerator(
        names=("H100 NVL",),
        peak_flops=835e12,
        memory_bytes=94e9,
        memory_bytes_per_s=3.9e12,
        link_bytes_per_s=300e9,
    ),
    "h100-pcie": Accelerator(
        names=("H100 PCIe",),
        peak_flops=756e12,
        memory_bytes=80e9,
        memory_bytes_per_s=2.0e12,
        link_bytes_per_s=64e9,
    ),
    "h200": Accelerator(
        names=("H200",),
        peak_flops=989e12,
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
    ),
    "h100": Accelerator(
        names=("H100",),
        peak_flops=989e12,
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
    ),
    "b200": Accelerator(
        names=("B200",),
        peak_flops=2.25e15,
        memory_bytes=180e9,
        memory_bytes_per_s=7.7e12,
        link_bytes_per_s=900e9,
    ),
    "a100": Accelerator(
        names=("A100",),
        peak_flops=312e12,
        memory_bytes=80e9,
        memory_bytes_per_s=2.0e12,
        link_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
    ),
    "l40s": Accelerator(
        names=("L40S",),
        peak_flops=362e12,
        memory_bytes=48e9,
        memory_bytes_per_s=0.864e12,
        link_bytes_per_s=32e9,
    ),
}


def detect_device(name: str = "auto") -> Device:
    """Return the device of this process: its own GPU, or the CPU.

    The GPU is that of number LOCAL_RANK. If CUDA_VISIBLE_DEVICES names exactly one, it is that one:
    schedulers show each process its own. `start_mesh` rejects one that several processes share.
    Raises UserError if `name` is "cuda" and there is no GPU, or fewer than processes.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return Device(
            torch_device=torch.device("cpu"),
            backend="gloo",
            pin_memory=False,
            fused_optimizer=True,
            peak_flops=None,
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_devices = torch.cuda.device_count()
    if num_devices == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        local_rank = 0
    if local_rank >= num_devices:
        raise UserError(
            f"Process {local_rank} of this node needs a GPU of its own, but the node has "
            f"{num_devices}. Start at most {num_devices} processes a node, or set "
            '[job] device = "cpu".'
        )
    torch_device = torch.device("cuda", local_rank)
    torch.cuda.set_device(torch_device)
    device_name = torch.cuda.get_device_name(torch_device)
    kind = next(
        (
            accelerator
            for accelerator in ACCELERATORS.values()
            if any(part in device_name for part in accelerator.names)
        ),
        None,
    )
    return Device(
        torch_device=torch_device,
        backend="cpu:gloo,cuda:nccl",
        pin_memory=True,
        fused_optimizer=True,
        peak_flops=None if kind is None else kind.peak_flops,
    )


def have_peer_access() -> bool:
    """Whether the GPUs of this node can access each other's memory, as symmetric memory
    requires."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return num_devices > 1 and all(
        torch.cuda.can_device_access_peer(0, peer) for peer in range(1, num_devices)
    )


def _peak_resident_kib() -> int:
    """Return the peak of this process. On Linux, `getrusage` starts from the peak of the parent
    process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak // 1024
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # For example, no descriptor is free: a measurement must not end training.
        return peak
    # Some sandboxes do not report it.
    match = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(match[1]) if match else peak
