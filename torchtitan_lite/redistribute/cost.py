"""Cost model of an exchange, and the options of its execution.

Time is counted on the busiest rank: it waits for a round to begin, pays for every message, and
moves its bytes at the speed of their link class. On a node with fewer cores than ranks, ranks take
turns, and the work of all ranks counts. The default figures are typical; `scripts.calibrate` fits
them to a machine.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, TypeAdapter

from torchtitan_lite.errors import LayoutError, RedistributionError
from torchtitan_lite.redistribute.exchange import Exchange
from torchtitan_lite.redistribute.placements import Holder, Nodes

Transport = Literal["shared_memory", "collective"]

BUCKET_BYTES = 25 << 20

_SAMPLED_HOLDERS = 8
"""Holders examined to find the busiest: in regular layouts all are equal, except the first and the
last, whose shards may be larger and smaller."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Time per message, of its sender and its receiver."""

    __pydantic_config__ = _STRICT

    latency_s: NonNegativeFloat
    bytes_per_s: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Load:
    """The counted work of one holder in a step."""

    rounds: int = 0
    """Rounds with messages."""
    pieces: int = 0
    messages_within: int = 0
    bytes_within: int = 0
    """Bytes sent or received within its node, whichever is more."""
    messages_between: int = 0
    bytes_between: int = 0
    bytes_copied: int = 0
    """Bytes copied locally."""

    def __add__(self, other: "Load") -> "Load":
        mine, others = asdict(self), asdict(other)
        return Load(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a machine. A node shares memory, or a fast link."""

    __pydantic_config__ = _STRICT

    round_s: NonNegativeFloat
    """Time to start and to complete a round of an exchange."""
    collective_s: NonNegativeFloat
    """The same for a collective of the backend, which `estimate` predicts."""
    piece_s: NonNegativeFloat
    """Time to start the copy of a rectangle."""
    copy_bytes_per_s: PositiveFloat
    within: Link
    between: Link
    collective_within: Link
    """Bandwidth of a collective of the backend within a node."""
    ranks_per_node: NonNegativeInt = 0
    """Ranks per node; 0: all ranks are on one node."""
    cores: PositiveFloat = 1e6
    """Cores per node: ranks that work at the same time."""

    def seconds(self, load: Load) -> float:
        """Predict the time of a step from the load of its busiest holder."""
        return (
            load.rounds * self.round_s
            + load.pieces * self.piece_s
            + load.messages_within * self.within.latency_s
            + load.bytes_within / self.within.bytes_per_s
            + load.messages_between * self.between.latency_s
            + load.bytes_between / self.between.bytes_per_s
            + load.bytes_copied / self.copy_bytes_per_s
        )

    def nodes(self, *, relay: bool = False) -> Nodes | None:
        """Nodes of the ranks; None if all are on one node."""
        return Nodes(self.ranks_per_node, relay) if self.ranks_per_node else None

    def with_ranks_per_node(self, ranks: int) -> "Costs":
        """Return the same costs with another number of ranks per node."""
        return replace(self, ranks_per_node=ranks)

    def save(self, path: Path) -> None:
        """Write the costs as JSON, atomically."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> "Costs":
        """Read costs written by `save`. Raises LayoutError naming the file and the problem."""
        try:
            return TypeAdapter(Costs).validate_json(path.read_bytes(), strict=True)
        except (OSError, ValueError) as error:
            raise LayoutError(
                f"{path} holds no costs: {error}. Write it with scripts.calibrate."
            ) from error


CPU = Costs(
    round_s=1e-4,
    collective_s=3e-4,
    piece_s=1.5e-6,
    copy_bytes_per_s=5e9,
    within=Link(latency_s=5e-6, bytes_per_s=2.5e9),
    between=Link(latency_s=5e-5, bytes_per_s=1e9),
    collective_within=Link(latency_s=5e-5, bytes_per_s=1e9),
)
"""Ranks that share memory, and Ethernet between machines."""

CUDA = Costs(
    round_s=3e-5,
    collective_s=2e-5,
    piece_s=4e-6,
    copy_bytes_per_s=1.2e12,
    within=Link(latency_s=2e-6, bytes_per_s=2.5e11),
    between=Link(latency_s=1e-5, bytes_per_s=4e10),
    collective_within=Link(latency_s=2e-6, bytes_per_s=3e11),
)
"""NVLink within a machine, a 400 Gb/s network between machines. From data sheets, not measured."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of an exchange."""

    bucket_bytes: int = BUCKET_BYTES
    """Bucket size; temporary memory is at most twice that."""
    transport: Transport | None = None
    """Transport; None: shared memory if possible."""
    costs: Costs | None = None
    """Costs of this machine; None: defaults for the kind of device."""

    def costs_on(self, device: torch.device) -> Costs:
        """Return the costs for planning, which must be equal on all ranks."""
        if self.costs is not None:
            return self.costs
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return _default_costs(device.type, _ranks_per_node(world_size))

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 << 14:
            raise RedistributionError(
                f"bucket_bytes = {self.bucket_bytes} is too little: at least {1 << 14} are needed."
            )


DEFAULT_OPTIONS = ExchangeOptions()


def default_costs(device_type: str) -> Costs:
    """Return the costs for a kind of device."""
    return CUDA if device_type == "cuda" else CPU


def exchange_seconds(exchange: Exchange, costs: Costs, itemsize: int) -> float:
    """Predict the time of an exchange: in each round the time of the busiest holder, or of all in
    turns, whichever is more."""
    share = core_share(exchange, costs)
    seconds = ([costs.seconds(load) for load in loads] for loads in round_loads(exchange, itemsize))
    return sum(max(max(of_round), share * sum(of_round)) for of_round in seconds)


def round_loads(exchange: Exchange, itemsize: int) -> list[tuple[Load, ...]]:
    """Return the loads of some holders in each round."""
    by_holder = [
        holder_loads(exchange, holder, itemsize) for holder in _sampled(_holders(exchange))
    ]
    return list(zip(*by_holder, strict=True))


def holder_loads(exchange: Exchange, holder: Holder, itemsize: int) -> list[Load]:
    """Return the load of one holder in each round."""
    node = (exchange.nodes or Nodes(1 << 62)).of
    loads = []
    for part in exchange.transfers(holder):
        sent, received = {True: 0, False: 0}, {True: 0, False: 0}
        peers: dict[bool, set[Holder]] = {True: set(), False: set()}
        for pieces, count in ((part.sends, sent), (part.receives, received)):
            for piece in pieces:
                near = node(piece.peer) == node(holder)
                count[near] += (piece.stop - piece.start) * itemsize
                peers[near].add(piece.peer)
        loads.append(
            Load(
                rounds=int(bool(part.sends or part.receives)),
                pieces=len(part.sends) + len(part.receives) + len(part.copies),
                messages_within=len(peers[True]),
                bytes_within=max(sent[True], received[True]),
                messages_between=len(peers[False]),
                bytes_between=max(sent[False], received[False]),
                bytes_copied=sum(p.stop - p.start for p in part.copies) * itemsize,
            )
        )
    return loads


def core_share(exchange: Exchange, costs: Costs) -> float:
    """Return the time per core of `round_loads` if all holders take turns on the cores."""
    holders, nodes = _holders(exchange), costs.nodes()
    num_nodes = len({nodes.of(holder) for holder in holders}) if nodes else 1
    return len(holders) / len(_sampled(holders)) / (costs.cores * num_nodes)


def _holders(exchange: Exchange) -> list[Holder]:
    return list(
        dict.fromkeys((*exchange.src.layout.mesh.holders, *exchange.dst.layout.mesh.holders))
    )


def _sampled(holders: list[Holder]) -> list[Holder]:
    if len(holders) <= _SAMPLED_HOLDERS:
        return holders
    last = len(holders) - 1
    return [holders[last * n // (_SAMPLED_HOLDERS - 1)] for n in range(_SAMPLED_HOLDERS)]


def _ranks_per_node(world_size: int) -> int:
    """Return the ranks per node as set by torchrun; 0 if nodes have different numbers of ranks,
    which all ranks see alike."""
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    nodes = os.environ.get("GROUP_WORLD_SIZE", "")
    if not (on_node.isdigit() and nodes.isdigit()):
        return 0
    even = int(on_node) * int(nodes) == world_size and int(nodes) > 1
    return int(on_node) if even else 0


@lru_cache
def _default_costs(device_type: str, ranks_per_node: int) -> Costs:
    return default_costs(device_type).with_ranks_per_node(ranks_per_node)
