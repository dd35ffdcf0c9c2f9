"""The estimate: `estimate` puts the trace of the configured mesh and the search
for better ones together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.distributed.device import ACCELERATORS, Accelerator
from torchtitan_lite.distributed.mesh import ParallelDims, resolve_degrees
from torchtitan_lite.models import model_spec
from torchtitan_lite.tools.estimate.extrapolation import RankStep
from torchtitan_lite.tools.estimate.mesh_step import (
    MEMORY_LIMIT,
    MeshStep,
    TimeEstimate,
    trace_mesh,
)
from torchtitan_lite.tools.estimate.meshes import MeshModel, sizes_of, with_degrees
from torchtitan_lite.tools.estimate.search import MeshSearch, search_meshes
from torchtitan_lite.tools.estimate.trace import CPU_DEVICE
from torchtitan_lite.tools.estimate.work import (
    FUSED_TRAFFIC,
    MATMUL_EFFICIENCY,
    TRAFFIC_EFFICIENCY,
    Traffic,
    Work,
)
from torchtitan_lite.training.builders.model import model_on_meta, spec_on_device
from torchtitan_lite.training.checks.constraints import check_mesh
from torchtitan_lite.training.trained_model import trained_spec


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a step."""

    model: str
    device: str
    world_size: int
    degrees: ParallelDims
    num_parameters: int
    """Parameters of the model."""
    checkpoint_bytes: int
    """Weights and optimizer state of all ranks."""
    num_microbatches: int
    tokens_per_step: int
    ranks: tuple[RankStep, ...]
    """Traced ranks: one, or one of the first and one of the last pipeline stage."""
    host_bytes: float
    """Memory that CPU offload keeps on the host, per rank."""
    traffic: Mapping[str, Traffic]
    """Traffic per step of the rank that communicates most, by axes of the mesh."""
    flops: float
    """FLOPs of the rank that computes most, recomputation included."""
    bubble: float
    """Part of the schedule's time in which a rank waits for others of the pipeline."""
    memory_bytes: float | None
    """Memory of the device; None for the CPU."""
    time: TimeEstimate | None
    """None for the CPU."""
    search: MeshSearch | None
    """None for the CPU, and without a search."""
    assumptions: tuple[str, ...]

    @property
    def fullest(self) -> RankStep:
        """The traced rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device; None if its memory is unknown."""
        if self.memory_bytes is None:
            return None
        return self.fullest.peak_bytes <= MEMORY_LIMIT * self.memory_bytes


def estimate(
    config: Config,
    world_size: int,
    device: str,
    *,
    extrapolate: bool = True,
    search: bool = True,
) -> Estimate:
    """Estimate a step of `config` on `world_size` ranks with a `device` each: a key of
    `ACCELERATORS`, or "cpu". With `extrapolate`, only some of a stage's blocks are traced if they
    are alike. With `search`, other meshes are traced to find the best, unless the device is "cpu".
    Raises ConfigError for an invalid mesh."""
    accelerator = ACCELERATORS.get(device)
    config, assumptions = _estimated(config, accelerator)
    check_mesh(config, world_size)
    degrees = resolve_degrees(config.parallelism, world_size)
    spec = trained_spec(config)
    step = trace_mesh(config, spec, degrees, accelerator, extrapolate=extrapolate)
    sizes = sizes_of(config, spec)
    mesh_search = None
    if accelerator is not None and search:
        model = MeshModel(config, spec, sizes, accelerator)

        def trace(mesh_degrees: ParallelDims) -> MeshStep:
            if mesh_degrees == degrees:
                return step
            chosen = with_degrees(config, mesh_degrees)
            return trace_mesh(chosen, spec, mesh_degrees, accelerator, extrapolate=extrapolate)

        mesh_search = search_meshes(model, step, trace, world_size, accelerator.memory_bytes)
    whole = model_on_meta(config, spec)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    num_saved = sum(
        parameter.numel() for parameter in whole.parameters() if parameter.requires_grad
    )
    slots = max(rank.slots for rank in step.ranks)
    return Estimate(
        model=f"{spec.name} {spec.flavor}",
        device=device,
        world_size=world_size,
        degrees=degrees,
        num_parameters=num_parameters,
        checkpoint_bytes=round((num_saved + num_parameters * slots) * sizes.parameter_bytes),
        num_microbatches=step.num_microbatches,
        tokens_per_step=step.tokens_per_step,
        ranks=step.ranks,
        host_bytes=step.host_bytes,
        traffic=_by_axis(max(step.ranks, key=_num_bytes)),
        flops=max(rank.schedule.flops + rank.update.flops for rank in step.ranks),
        bubble=step.bubble,
        memory_bytes=None if accelerator is None else accelerator.memory_bytes,
        time=None if accelerator is None else step.time,
        search=mesh_search,
        assumptions=(*_extrapolation(step.ranks), *assumptions),
    )


def _estimated(config: Config, accelerator: Accelerator | None) -> tuple[Config, list[str]]:
    """Return the configuration that is traced, and how it differs from the given one."""
    model, training, assumptions = config.model, config.training, []
    parallelism, compilation = config.parallelism, config.compile
    if accelerator is not None:
        assumptions += _time_assumptions(compilation.covers("model"))
        if training.mixed_precision_param == "auto":
            training = training.model_copy(update={"mixed_precision_param": "bfloat16"})
    if compilation.covers("model"):
        assumptions.append("Compiled blocks: memory is that of the uncompiled step, which is more.")
    elif accelerator is not None:
        assumptions.append(
            "Without compile, operations run as on the CPU: some are fused on a GPU."
        )
    if _takes_flex(config, is_gpu=accelerator is not None):
        model = model.model_copy(update={"attention_backend": "sdpa", "attention_mask": "causal"})
        assumptions.append(
            "FlexAttention is traced as causal attention, which has no mask in memory."
        )
    elif model_spec(model).document_mask:
        assumptions.append("Document masks take S x S bytes per sample, as SDPA needs them.")
    if model.uses_float8:
        kept = [
            converter for converter in model.converters if converter != "quantize.linear.float8"
        ]
        model = model.model_copy(update={"converters": kept})
        assumptions.append("quantize.linear.float8 is not part of the estimate.")
    if parallelism.enable_async_tensor_parallel:
        parallelism = parallelism.model_copy(update={"enable_async_tensor_parallel": False})
        assumptions.append("Tensor parallelism does not overlap with computation.")
    if model_spec(model).num_experts:
        assumptions.append("Routers send every expert the same number of tokens.")
    if training.enable_cpu_offload:
        assumptions.append("Weights, gradients and optimizer state are on the host.")
    if training.batch_size_warmup:
        assumptions.append("The step is one after training.batch_size_warmup.")
    assumptions.append(
        "Peaks are of live tensors. What an allocator reserves beyond them is not part of it: "
        f"a step fits if its peak is at most {MEMORY_LIMIT:.0%} of the device."
    )
    return config.model_copy(
        update={
            "model": model.model_copy(update={"print_after_conversion": False}),
            "training": training,
            "parallelism": parallelism,
            "job": config.job.model_copy(update={"device": "cpu"}),
            "validation": config.validation.model_copy(update={"enable": False}),
        }
    ), assumptions


def _time_assumptions(is_compiled: bool) -> list[str]:
    fused = f", and of {FUSED_TRAFFIC:.0%} of the traffic in compiled blocks" if is_compiled else ""
    return [
        f"Time: matrix products run at {MATMUL_EFFICIENCY:.0%} of the peak, all else at "
        f"{TRAFFIC_EFFICIENCY:.0%} of the memory bandwidth{fused}.",
        "Collectives are rings at the bandwidth of data sheets. FSDP's run beside the computation; "
        "all others do not.",
        "The figures of time were not fitted to a GPU.",
    ]


def _takes_flex(config: Config, *, is_gpu: bool) -> bool:
    device = replace(CPU_DEVICE, torch_device=torch.device("cuda")) if is_gpu else CPU_DEVICE
    dims = spec_on_device(config, device).dims
    return getattr(dims, "attention_backend", "sdpa") == "flex"


def _by_axis(rank: RankStep) -> dict[str, Traffic]:
    total: Work = rank.schedule + rank.update
    by_axis: dict[str, Traffic] = {}
    for (axis, _, _), traffic in total.traffic.items():
        by_axis[axis] = by_axis.get(axis, Traffic()) + traffic
    return by_axis


def _num_bytes(rank: RankStep) -> float:
    return sum(traffic.num_bytes for traffic in _by_axis(rank).values())


def _extrapolation(ranks: tuple[RankStep, ...]) -> list[str]:
    rank = ranks[0]
    if len(rank.traced_blocks) == 1:
        return [f"All {rank.num_blocks} layers of the traced rank were traced."]
    few, more = rank.traced_blocks
    return [
        f"Traced with {few} and {more} layers per stage, and extrapolated linearly to the "
        f"{rank.num_blocks} of rank {rank.rank}."
    ]
