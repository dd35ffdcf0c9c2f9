"""The traced step of a mesh: the ranks of its first and its last pipeline stage, and the time of
the step."""

from dataclasses import dataclass, replace

from torchtitan_lite.config import Config
from torchtitan_lite.data import batch_sizes
from torchtitan_lite.distributed.device import ACCELERATORS, LOGITS_PER_CHUNK, Accelerator
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.pipeline_order import ActionCosts, simulate
from torchtitan_lite.parallel.pipeline_stages import plan_stages, stage_weights, step_order
from torchtitan_lite.tools.estimate.extrapolation import Point, RankStep, rank_step
from torchtitan_lite.tools.estimate.memory import Kind
from torchtitan_lite.training.checks.mesh_constraints import pipeline_microbatches

MEMORY_LIMIT = 0.9
"""Part of the device's memory that a step may use; the rest is for the CUDA context, the buffers of
NCCL and the gaps of the allocator."""
_ON_HOST: tuple[Kind, ...] = ("weights", "optimizer", "gradients")
"""Kinds of memory that CPU offload keeps on the host."""


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Predicted time of a step."""

    step_s: float
    compute_s: float
    """Computation of the rank with most work, as is `exposed_s`."""
    exposed_s: float
    """Communication beside which nothing is computed, without the bubble."""
    bubble_s: float
    update_s: float
    """Reduction of the step's numbers, and the optimizer."""
    mfu: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class MeshStep:
    """The traced step of a mesh."""

    degrees: ParallelDims
    num_microbatches: int
    tokens_per_step: int
    ranks: tuple[RankStep, ...]
    """Traced ranks: one, or one of the first and one of the last pipeline stage."""
    host_bytes: float
    """Memory that CPU offload keeps on the host, per rank."""
    bubble: float
    """Part of the schedule's time in which a rank waits for others of the pipeline."""
    time: TimeEstimate

    @property
    def fullest(self) -> RankStep:
        """The traced rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def fits(self, memory_bytes: float) -> bool:
        """Whether the peak fits a device with `memory_bytes`."""
        return self.fullest.peak_bytes <= MEMORY_LIMIT * memory_bytes


def trace_mesh(
    config: Config,
    spec: ModelSpec,
    degrees: ParallelDims,
    accelerator: Accelerator | None,
    *,
    extrapolate: bool = True,
) -> MeshStep:
    """Trace a step of `config`, whose degrees are `degrees`. Without an accelerator it is one of
    the CPU, whose times are those of an H200. With `extrapolate`, only some of a stage's blocks are
    traced if they are alike."""
    num_microbatches = _microbatches(config, degrees)
    # Time is not predicted for a CPU, but the trace needs some figures.
    figures = accelerator or ACCELERATORS["h200"]
    per_stage = degrees.batch * degrees.cp * degrees.tp
    ranks = tuple(
        rank_step(
            config,
            spec,
            degrees,
            figures,
            rank=stage * per_stage,
            world_size=per_stage * degrees.pp,
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
    flops_per_token = spec.cost(config.training.seq_len).flops_per_token
    peak_flops = figures.peak_flops * per_stage * degrees.pp
    return MeshStep(
        degrees=degrees,
        num_microbatches=num_microbatches,
        tokens_per_step=tokens,
        ranks=ranks,
        host_bytes=host_bytes,
        bubble=bubble,
        time=_time(ranks, bubble, tokens, flops_per_token / peak_flops),
    )


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
    timeline = simulate(order, ActionCosts(stage_weights=weights))
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


def _host_bytes(point: Point) -> float:
    return sum(point.bytes[kind] for kind in _ON_HOST)


def _on_device(points: tuple[Point, ...]) -> tuple[Point, ...]:
    return tuple(
        replace(point, bytes={**point.bytes, **dict.fromkeys(_ON_HOST, 0.0)}) for point in points
    )
