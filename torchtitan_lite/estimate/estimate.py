"""The estimate: `estimate` puts traces, cost model and mesh model together.

Layer: `estimate.extrapolation`, `estimate.meshes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torchtitan_lite.builders.model import model_on_meta, spec_on_device
from torchtitan_lite.config import Config
from torchtitan_lite.config.constraints import check_mesh
from torchtitan_lite.config.mesh_constraints import pipeline_microbatches
from torchtitan_lite.config.trained_model import trained_spec
from torchtitan_lite.data import batch_sizes
from torchtitan_lite.device import ACCELERATORS, LOGITS_PER_CHUNK, Accelerator
from torchtitan_lite.estimate.extrapolation import Point, RankStep, rank_step
from torchtitan_lite.estimate.memory import Kind
from torchtitan_lite.estimate.meshes import (
    MEMORY_LIMIT,
    MeshModel,
    MeshPrediction,
    sizes_of,
)
from torchtitan_lite.estimate.trace import CPU_DEVICE
from torchtitan_lite.estimate.work import (
    FUSED_TRAFFIC,
    MATMUL_EFFICIENCY,
    TRAFFIC_EFFICIENCY,
    Traffic,
    Work,
)
from torchtitan_lite.mesh import ParallelDims, resolve_degrees
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel.fsdp import compute_dtype_of
from torchtitan_lite.parallel.pipeline_order import Costs, simulate
from torchtitan_lite.parallel.pipeline_stages import plan_stages, stage_weights, step_order
from torchtitan_lite.spec import ModelSpec

NUM_MESHES = 5
_ON_HOST: tuple[Kind, ...] = ("weights", "optimizer", "gradients")
"""Kinds of memory that CPU offload keeps on the host."""


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Predicted time of a step."""

    step_s: float
    compute_s: float
    """Of the rank with most work, as `exposed_s`."""
    exposed_s: float
    """Communication beside which nothing is computed, without the bubble."""
    bubble_s: float
    update_s: float
    """Reduction of the step's numbers, and the optimizer."""
    mfu: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a step."""

    model: str
    device: str
    world_size: int
    degrees: ParallelDims
    num_parameters: int
    """Of the model."""
    checkpoint_bytes: int
    """Weights and optimizer state of all ranks."""
    num_microbatches: int
    tokens_per_step: int
    ranks: tuple[RankStep, ...]
    """Traced ranks: one, or one of the first and one of the last pipeline stage."""
    host_bytes: float
    """Memory that CPU offload keeps on the host, per rank."""
    traffic: Mapping[str, Traffic]
    """By axes of the mesh, per step, of the rank that communicates most."""
    flops: float
    """FLOPs of the rank that computes most, recomputation included."""
    bubble: float
    """Part of the schedule's time in which a rank waits for others of the pipeline."""
    memory_bytes: float | None
    """Memory of the device; None for the CPU."""
    time: TimeEstimate | None
    """None for the CPU."""
    meshes: tuple[MeshPrediction, ...]
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
    num_meshes: int = NUM_MESHES,
) -> Estimate:
    """Estimate a step of `config` on `world_size` ranks with a `device` each: a key of
    `ACCELERATORS`, or "cpu". With `extrapolate`, only some of a stage's blocks are traced if they
    are alike. Raises ConfigError for an invalid mesh."""
    accelerator = ACCELERATORS.get(device)
    config, assumptions = _estimated(config, accelerator)
    check_mesh(config, world_size)
    degrees = resolve_degrees(config.parallelism, world_size)
    spec = trained_spec(config)
    num_microbatches = _microbatches(config, degrees)
    # Time is not predicted for a CPU, but the trace needs some figures.
    figures = accelerator or ACCELERATORS["h200"]
    ranks = tuple(
        rank_step(
            config,
            spec,
            degrees,
            figures,
            rank=stage * (world_size // degrees.pp),
            world_size=world_size,
            num_microbatches=num_microbatches,
            logits_per_chunk=LOGITS_PER_CHUNK["cpu" if accelerator is None else "cuda"],
            extrapolate=extrapolate,
        )
        for stage in sorted({0, degrees.pp - 1})
    )
    host_bytes = 0.0
    if config.training.enable_cpu_offload:
        host_bytes = max(_host_bytes(point) for rank in ranks for point in rank.points)
        ranks = tuple(replace(rank, points=_on_device(rank.points)) for rank in ranks)
    tokens = batch_sizes(config.training, degrees.batch).final * config.training.seq_len
    bubble = _bubble(config, spec, degrees, num_microbatches)
    slots = max(rank.slots for rank in ranks)
    compute_dtype = compute_dtype_of(config.training, CPU_DEVICE)
    sizes = sizes_of(config, spec, slots=slots, compute_bytes=compute_dtype.itemsize)
    time, meshes = None, ()
    if accelerator is not None:
        peak_flops = accelerator.peak_flops * world_size
        flops_per_token = spec.cost(config.training.seq_len).flops_per_token
        time = _time(ranks, bubble, tokens, flops_per_token / peak_flops)
        model = MeshModel(config, spec, sizes, accelerator)
        fullest = max(ranks, key=lambda rank: rank.peak_bytes)
        model.fit(
            degrees,
            fullest.peak.bytes,
            compute_s=max(rank.schedule.compute_s for rank in ranks),
            step_s=time.step_s,
        )
        meshes = tuple(model.best(world_size, num_meshes))
    whole = model_on_meta(config, spec)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    num_saved = sum(one.numel() for one in whole.parameters() if one.requires_grad)
    return Estimate(
        model=f"{spec.name} {spec.flavor}",
        device=device,
        world_size=world_size,
        degrees=degrees,
        num_parameters=num_parameters,
        checkpoint_bytes=round((num_saved + num_parameters * slots) * sizes.parameter_bytes),
        num_microbatches=num_microbatches,
        tokens_per_step=tokens,
        ranks=ranks,
        host_bytes=host_bytes,
        traffic=_by_axis(max(ranks, key=_num_bytes)),
        flops=max(rank.schedule.flops + rank.update.flops for rank in ranks),
        bubble=bubble,
        memory_bytes=None if accelerator is None else accelerator.memory_bytes,
        time=time,
        meshes=meshes,
        assumptions=(*_extrapolation(ranks, spec), *assumptions),
    )


def _estimated(config: Config, accelerator: Accelerator | None) -> tuple[Config, list[str]]:
    """Return the configuration that is traced, and how it differs from the given one."""
    model, training, found = config.model, config.training, []
    parallelism, compilation = config.parallelism, config.compile
    if accelerator is not None:
        found += _time_assumptions(compilation.covers("model"))
        if training.mixed_precision_param == "auto":
            training = training.model_copy(update={"mixed_precision_param": "bfloat16"})
    if compilation.covers("model"):
        found.append("Compiled blocks: memory is that of the uncompiled step, which is more.")
    elif accelerator is not None:
        found.append("Without compile, operations run as on the CPU: some are fused on a GPU.")
    if _takes_flex(config, is_gpu=accelerator is not None):
        model = model.model_copy(update={"attention_backend": "sdpa", "attention_mask": "causal"})
        found.append("FlexAttention is traced as causal attention, which has no mask in memory.")
    elif model_spec(model).document_mask:
        found.append("Document masks take S x S bytes per sample, as SDPA needs them.")
    if model.uses_float8:
        kept = [one for one in model.converters if one != "quantize.linear.float8"]
        model = model.model_copy(update={"converters": kept})
        found.append("quantize.linear.float8 is not part of the estimate.")
    if parallelism.enable_async_tensor_parallel:
        parallelism = parallelism.model_copy(update={"enable_async_tensor_parallel": False})
        found.append("Tensor parallelism does not overlap with computation.")
    if model_spec(model).num_experts:
        found.append("Routers send every expert the same number of tokens.")
    if training.enable_cpu_offload:
        found.append("Weights, gradients and optimizer state are on the host.")
    if training.batch_size_warmup:
        found.append("The step is one after training.batch_size_warmup.")
    found.append(
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
    ), found


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


def _microbatches(config: Config, degrees: ParallelDims) -> int:
    """Return the microbatches per rank and step."""
    if degrees.pp > 1:
        return pipeline_microbatches(config, degrees)
    samples = batch_sizes(config.training, degrees.batch).final
    return samples // (config.training.local_batch_size * degrees.batch)


def _bubble(config: Config, spec: ModelSpec, degrees: ParallelDims, num: int) -> float:
    """Return the bubble of the schedule, with stages that take as long as they have layers."""
    if degrees.pp == 1:
        return 0.0
    plan = plan_stages(spec, config.parallelism)
    order = step_order(plan, config.parallelism.pipeline_parallel_schedule, num)
    weights = tuple(map(float, stage_weights(plan, spec, config.parallelism)))
    # The rank with most work waits least: its idle time is the bubble.
    timeline = simulate(order, Costs(stage_weights=weights))
    busiest = max(sum(span.end - span.start for span in row) for row in timeline.rows)
    return 1 - busiest / timeline.makespan


def _time(
    ranks: tuple[RankStep, ...], bubble: float, tokens: int, step_flops_share: float
) -> TimeEstimate:
    """Return the time of a step. `step_flops_share`: seconds per token at the peak of all ranks."""
    slowest = max(ranks, key=lambda rank: rank.schedule.seconds)
    busy_s = slowest.schedule.seconds
    update_s = max(rank.update.seconds for rank in ranks)
    bubble_s = busy_s * bubble / (1 - bubble)
    step_s = busy_s + bubble_s + update_s
    return TimeEstimate(
        step_s=step_s,
        compute_s=slowest.schedule.compute_s,
        exposed_s=busy_s - slowest.schedule.compute_s,
        bubble_s=bubble_s,
        update_s=update_s,
        mfu=step_flops_share * tokens / step_s,
        tokens_per_s=tokens / step_s,
    )


def _by_axis(rank: RankStep) -> dict[str, Traffic]:
    total: Work = rank.schedule + rank.update
    found: dict[str, Traffic] = {}
    for (axis, _, _), traffic in total.traffic.items():
        found[axis] = found.get(axis, Traffic()) + traffic
    return found


def _num_bytes(rank: RankStep) -> float:
    return sum(one.num_bytes for one in _by_axis(rank).values())


def _host_bytes(point: Point) -> float:
    return sum(point.bytes[kind] for kind in _ON_HOST)


def _on_device(points: tuple[Point, ...]) -> tuple[Point, ...]:
    return tuple(
        replace(point, bytes={**point.bytes, **dict.fromkeys(_ON_HOST, 0.0)}) for point in points
    )


def _extrapolation(ranks: tuple[RankStep, ...], spec: ModelSpec) -> list[str]:
    rank = ranks[0]
    if len(rank.traced_blocks) == 1:
        return [f"All {rank.num_blocks} blocks of the traced rank were traced."]
    few, more = rank.traced_blocks
    return [
        f"Traced with {few} and {more} blocks per stage, and extrapolated linearly to the "
        f"{rank.num_blocks} of rank {rank.rank}."
    ]
