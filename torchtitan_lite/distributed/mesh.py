"""The device mesh: axes, degrees, and reductions over all ranks.

All axes always exist; a degree of 1 is the identity, so no caller checks whether a parallelism is
on.

Axes, outermost first: `pp` pipeline stages, `dp_replicate` replicas of the weights, `dp_shard`
shards of the weights, `cp` shards of the sequence, `tp` shards of the matrices. Experts use another
view of the ranks of the last three: `expert_shard` shards of the experts' weights, `ep` shards of
the experts, `etp` shards of an expert's matrices.
"""

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.core.rank.supervised import STORE_LISTENER
from torchtitan_lite.distributed.axis_groups import AxisGroups, leave_groups
from torchtitan_lite.distributed.device import Device, detect_device
from torchtitan_lite.distributed.host_collectives import all_gather_ints
from torchtitan_lite.distributed.network import let_gloo_listen_toward_master
from torchtitan_lite.distributed.stores import store_at
from torchtitan_lite.distributed.torch_compat import as_dtensor

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The size of each axis; their product is checked."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Shape of the experts' view of the ranks."""
        sharing = self.dp_shard * self.cp * self.tp
        shards = sharing // (self.ep * self.etp)
        return (self.pp, self.dp_replicate, shards, self.ep, self.etp)

    @property
    def batch(self) -> int:
        """Ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def token_copies(self) -> int:
        """Ranks with the same samples."""
        return self.pp * self.cp * self.tp


def resolve_degrees(config: ParallelismConfig, world_size: int) -> ParallelDims:
    """Resolve `data_parallel_shard_degree = -1` and check that the product is `world_size`. Raises
    MeshError with the equation and the nearest degree that works."""
    degrees = _dense_degrees(config, world_size)
    ep, etp = config.expert_parallel_degree, config.expert_tensor_parallel_degree
    sharing = degrees.dp_shard * degrees.cp * degrees.tp
    if sharing % (ep * etp):
        fitting = [str(d) for d in range(1, sharing + 1) if sharing % (d * etp) == 0]
        remedy = (
            f"With expert_tensor_parallel_degree = {etp}, expert_parallel_degree may be "
            f"{', '.join(fitting)}"
            if fitting
            else f"Set expert_tensor_parallel_degree to a divisor of {sharing}"
        )
        raise MeshError(
            f"expert_parallel_degree ({ep}) x expert_tensor_parallel_degree ({etp}) = {ep * etp} "
            f"does not divide the ranks that share the weights: data_parallel_shard "
            f"({degrees.dp_shard}) x context ({degrees.cp}) x tensor ({degrees.tp}) = {sharing}. "
            f"{remedy}."
        )
    return replace(degrees, ep=ep, etp=etp)


def _dense_degrees(config: ParallelismConfig, world_size: int) -> ParallelDims:
    replicate, shard = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    other_degrees = (
        config.pipeline_parallel_degree
        * replicate
        * config.context_parallel_degree
        * config.tensor_parallel_degree
    )
    product = other_degrees * (shard if shard > 0 else max(1, world_size // other_degrees))
    if product != world_size:
        shown = "what is left" if shard == -1 else str(shard)
        remedies = [f"start {product} processes"]
        if world_size % other_degrees == 0:
            remedies.insert(0, f"set data_parallel_shard_degree = {world_size // other_degrees}")
        raise MeshError(
            f"pipeline ({config.pipeline_parallel_degree}) x data_parallel_replicate ({replicate})"
            f" x data_parallel_shard ({shown}) x context ({config.context_parallel_degree})"
            f" x tensor ({config.tensor_parallel_degree}) = {product}, but there "
            f"{'is 1 process' if world_size == 1 else f'are {world_size} processes'}: "
            f"{', or '.join(remedies)}."
        )
    return ParallelDims(
        pp=config.pipeline_parallel_degree,
        dp_replicate=replicate,
        dp_shard=product // other_degrees,
        cp=config.context_parallel_degree,
        tp=config.tensor_parallel_degree,
    )


class Mesh:
    """This rank's view of the mesh. Use `start_mesh`."""

    def __init__(
        self,
        device: Device,
        degrees: ParallelDims,
        timeout_s: float = CommConfig().init_timeout_seconds,
        groups: AxisGroups | None = None,
    ) -> None:
        """`groups` are those of another mesh, to share them."""
        self.device = device
        self.degrees = degrees
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.groups = groups or AxisGroups(timedelta(seconds=timeout_s))
        self._with_degrees: dict[ParallelDims, Mesh] = {degrees: self}
        self.device_mesh: DeviceMesh = self.groups.device_mesh(device.kind, degrees.shape, AXES)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The experts' view of the ranks. The first use creates process groups: every rank must
        call it."""
        return self.groups.device_mesh(self.device.kind, self.degrees.expert_shape, EXPERT_AXES)

    def to_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Return a tensor of this stage as a DTensor on all ranks of the stage: a plain tensor is
        replicated, and one on some of the axes is replicated along the others. It shares memory,
        also with a tensor on the host for a mesh of devices."""
        local, axes, own = tensor, (), ()
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.size() * self.degrees.pp == self.world_size:
                return tensor
            local, own = tensor.to_local(), tensor.placements
            axes = tensor.device_mesh.mesh_dim_names or ()
        is_of_experts = not set(axes) <= set(AXES)
        stage = self._expert_stage if is_of_experts else self._stage
        unknown = set(axes) - set(stage.mesh_dim_names or ())
        if unknown:
            raise MeshError(
                f"The tensor is on the axes {axes}, but {sorted(unknown)} are not axes of a "
                f"pipeline stage: {stage.mesh_dim_names}."
            )
        by_axis = dict(zip(axes, own, strict=True))
        placements = [by_axis.get(axis, Replicate()) for axis in stage.mesh_dim_names or ()]
        return as_dtensor(local.detach(), stage, tuple(placements), tensor.shape)

    @cached_property
    def _stage(self) -> DeviceMesh:
        """The ranks of this rank's pipeline stage."""
        return self.device_mesh[AXES[1:]]

    @cached_property
    def _expert_stage(self) -> DeviceMesh:
        return self.expert_mesh[EXPERT_AXES[1:]]

    def with_degrees(self, degrees: ParallelDims) -> "Mesh":
        """Return the same ranks with other degrees; cached, sharing process groups. Every rank must
        call it."""
        if degrees not in self._with_degrees:
            self._with_degrees[degrees] = Mesh(self.device, degrees, groups=self.groups)
        return self._with_degrees[degrees]

    @property
    def is_leader(self) -> bool:
        """True on the rank that prints and writes shared files."""
        return self.rank == 0

    @property
    def batch_rank(self) -> int:
        """This rank's index among the `degrees.batch` ranks with different samples."""
        replicate = self.device_mesh.get_local_rank("dp_replicate")
        return replicate * self.degrees.dp_shard + self.device_mesh.get_local_rank("dp_shard")

    def all_reduce_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sum each of `numbers` over all ranks. Every rank must call it."""
        return self.all_reduce_(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Every rank must call it; the host waits."""
        return self.all_reduce_(torch.tensor([float(flag)])).item() > 0

    def barrier(self) -> None:
        """Block until every rank calls it, on the CPU: a GPU barrier would not block the host."""
        self.all_reduce_(torch.zeros(1))

    def broadcast_int(self, number: int) -> int:
        """Broadcast the leader's `number`. Every rank must call it."""
        tensor = torch.tensor([number])
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of all process groups of this rank."""
        self.groups.set_timeout(timedelta(seconds=seconds))


@contextmanager
def start_mesh(
    config: ParallelismConfig | None = None,
    comm: CommConfig | None = None,
    device: Device | None = None,
    dump_folder: str = ".",
) -> Iterator[Mesh]:
    """Join the processes started by torchrun, or run alone; leave at the end. An existing process
    group is used and not destroyed. `config` is by default one data-parallel axis, and `device`
    this process's own GPU, else the CPU. `dump_folder` is for the flight recorder's files if a
    collective times out."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # A process alone that configures nothing, such as a notebook, keeps its environment.
    has_recorder = comm is not None or world_size > 1
    config, comm = config or ParallelismConfig(), comm or CommConfig()
    device = device or detect_device()
    joined_before = dist.is_initialized()
    degrees = resolve_degrees(config, dist.get_world_size() if joined_before else world_size)
    # Held until all ranks have left.
    store = _inherited_store()
    if not joined_before:
        if has_recorder:
            _configure_flight_recorder(comm, dump_folder, is_nccl="nccl" in device.backend)
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        if world_size > 1:
            let_gloo_listen_toward_master()
            dist.init_process_group(device.backend, timeout=timeout)
            check_own_gpus(device.uuid)
        else:
            store = HashStore()
            dist.init_process_group(
                device.backend, store=store, rank=0, world_size=1, timeout=timeout
            )
    try:
        yield Mesh(device, degrees, comm.init_timeout_seconds)
    finally:
        if not joined_before:
            leave_groups()
        del store


def _inherited_store() -> TCPStore | None:
    """Return the store at the socket that rank 0 inherits from the parent of the ranks; None in
    other processes, or at a second call."""
    descriptor = os.environ.pop(STORE_LISTENER, None)
    if descriptor is None:
        return None
    with socket.socket(fileno=int(descriptor)) as listener:
        return store_at(listener)


def check_own_gpus(uuid: str) -> None:
    """Raise MeshError on all ranks if ranks share a GPU, which NCCL rejects later and with less
    detail. `uuid` is that of this rank's GPU, empty if it has none. Every rank must call it.

    Tests with several ranks on one GPU create a process group over gloo before `start_mesh`."""
    key = int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=7).digest(), "little")
    by_gpu: dict[int, list[int]] = {}
    for rank, of_rank in enumerate(all_gather_ints(key if uuid else 0)):
        by_gpu.setdefault(of_rank, []).append(rank)
    by_gpu.pop(0, None)
    shared = [ranks for ranks in by_gpu.values() if len(ranks) > 1]
    if shared:
        raise MeshError(
            f"Ranks {', '.join(map(str, shared[0]))} have the same GPU: CUDA_VISIBLE_DEVICES shows "
            "each of them only that one, or LOCAL_RANK is not set. Show each process its own GPU, "
            "or all GPUs of the node with LOCAL_RANK (torchrun sets it), or start fewer processes."
        )


def _configure_flight_recorder(comm: CommConfig, dump_folder: str, *, is_nccl: bool) -> None:
    """Environment variables for new process groups; the user's values are kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    if not is_nccl:
        return
    traces = Path(dump_folder) / comm.save_traces_folder
    settings = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if comm.trace_buf_size else "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(traces / comm.save_traces_file_prefix),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if comm.trace_buf_size:
        traces.mkdir(parents=True, exist_ok=True)
