"""Work of a rank in a step: floating-point operations, memory traffic and communication, with the
time that each takes on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchtitan_lite.distributed.device import Accelerator

MATMUL_EFFICIENCY = 0.7
"""Part of the peak FLOP/s that matrix products and attention reach."""
TRAFFIC_EFFICIENCY = 0.8
"""Part of the memory bandwidth that other operations reach."""
FUSED_TRAFFIC = 0.35
"""Part of the memory traffic of other operations that is left in compiled blocks."""
_COLLECTIVE_S = 2e-5
"""Time to start and to complete a collective."""
_NEAR_LATENCY_S, _FAR_LATENCY_S = 2e-6, 1e-5
"""Time per message within a node and between nodes. From data sheets, not measured."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over the same axes."""

    count: float = 0
    num_bytes: float = 0
    """The larger of input and output, as in `debug.communication.Collective`."""
    seconds: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            count=self.count + other.count,
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
        )

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(
            count=self.count * factor,
            num_bytes=self.num_bytes * factor,
            seconds=self.seconds * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sums over operations; a vector, so that layers and microbatches can be scaled."""

    flops: float = 0
    matmul_s: float = 0
    other_s: float = 0
    """Operations that are limited by the memory bandwidth."""
    traffic: Mapping[tuple[str, str, bool], Traffic] = field(default_factory=dict)
    """Traffic by axes, operation, and whether FSDP overlaps it with computation."""

    def __add__(self, other: "Work") -> "Work":
        keys = {**self.traffic, **other.traffic}
        none = Traffic()
        return Work(
            flops=self.flops + other.flops,
            matmul_s=self.matmul_s + other.matmul_s,
            other_s=self.other_s + other.other_s,
            traffic={k: self.traffic.get(k, none) + other.traffic.get(k, none) for k in keys},
        )

    def __mul__(self, factor: float) -> "Work":
        return Work(
            flops=self.flops * factor,
            matmul_s=self.matmul_s * factor,
            other_s=self.other_s * factor,
            traffic={key: amount * factor for key, amount in self.traffic.items()},
        )

    def __sub__(self, other: "Work") -> "Work":
        return self + other * -1

    def split(self) -> tuple["Work", "Work"]:
        """Return the work without what FSDP overlaps, and that alone."""
        overlapped = {key: amount for key, amount in self.traffic.items() if key[2]}
        exposed = {key: amount for key, amount in self.traffic.items() if not key[2]}
        return replace(self, traffic=exposed), Work(traffic=overlapped)

    @property
    def compute_s(self) -> float:
        """Seconds of computation."""
        return self.matmul_s + self.other_s

    def communication_s(self, *, overlapped: bool) -> float:
        """Return the seconds of the collectives that are, or are not, FSDP's."""
        return sum(amount.seconds for key, amount in self.traffic.items() if key[2] is overlapped)

    @property
    def seconds(self) -> float:
        """Seconds of the work: FSDP's collectives run beside the computation, and all others
        extend it."""
        hidden = self.communication_s(overlapped=True)
        return max(self.compute_s, hidden) + self.communication_s(overlapped=False)


def collective_seconds(
    operation: str, num_bytes: float, size: int, near: int, accelerator: Accelerator
) -> float:
    """Predict the time of a collective of `size` ranks, `near` of which are on this rank's node:
    a ring, whose links between nodes limit it. Rings of many ranks are trees in practice, so their
    latency counts once per doubling."""
    if size == 1 or num_bytes == 0:
        return 0.0
    if near == size:
        latency_s, bandwidth = _NEAR_LATENCY_S, accelerator.link_bytes_per_s
    else:
        # The GPUs of a node share its links to others.
        latency_s, bandwidth = _FAR_LATENCY_S, accelerator.network_bytes_per_s * near
    turns = {"all_reduce": 2.0, "broadcast": 1.0, "send": 1.0, "recv": 1.0}.get(operation, 1.0)
    share = 1.0 if operation in ("send", "recv") else (size - 1) / size
    if operation == "all_to_all" and near != size:
        # Each rank sends on its own, and what stays on the node does not use the network.
        bandwidth, share = accelerator.network_bytes_per_s, (size - near) / size
    latency_s *= max(1, (size - 1).bit_length())
    return _COLLECTIVE_S + turns * (latency_s + share * num_bytes / bandwidth)
