"""A step with all layers and microbatches, from traces with few of them.

The blocks of a stage are alike, so memory at each point of the step, and the work, are affine in
their number: two traces determine them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config import Config
from torchtitan_lite.distributed.device import Accelerator
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.pipeline_stages import plan_stages
from torchtitan_lite.tools.estimate.memory import KINDS, ByKind
from torchtitan_lite.tools.estimate.recorder import (
    Place,
    StepTrace,
    UnitSpan,
    label_from_end,
    label_from_start,
)
from torchtitan_lite.tools.estimate.trace import trace_step
from torchtitan_lite.tools.estimate.work import Work
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.debug.modules import ROOT

_FEWEST_BLOCKS = 2
"""The first and the last block of a stage differ from the others under FSDP."""
_DEPTHS = (2, 3)
"""Stages of the pipelines that are traced in place of a longer one."""
_MOST_MICROBATCHES = 2
"""Without a pipeline, the second microbatch is like all later ones."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Memory at a point of the step."""

    position: float
    """Units of the model that ran before."""
    unit: str
    """A layer by its number in the model, or the name of another module."""
    phase: str
    bytes: ByKind


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The step of one rank."""

    rank: int
    stages: tuple[int, ...]
    """Pipeline stages of the rank, from 0."""
    num_stages: int
    """Stages of the pipeline; 1 without one."""
    points: tuple[Point, ...]
    """Points of the first microbatches, in the order of time."""
    schedule: Work
    """Forward and backward of all microbatches."""
    update: Work
    num_parameters: int
    num_slot_elements: int
    num_blocks: int
    """Blocks of the stage, or of all stages of the rank."""
    traced_blocks: tuple[int, ...]
    """Blocks in each trace; one trace: nothing was extrapolated."""

    @property
    def slots(self) -> float:
        """Optimizer state per parameter: the mean number of tensors of its size."""
        return self.num_slot_elements / max(1, self.num_parameters)

    @property
    def peak(self) -> Point:
        """The point with the most memory."""
        return max(self.points, key=lambda point: sum(point.bytes.values()))

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak."""
        return sum(self.peak.bytes.values())


@dataclass(frozen=True, kw_only=True)
class _RankStages:
    """The pipeline stages of a rank."""

    numbers: tuple[int, ...]
    total: int
    """Stages of the pipeline."""
    blocks: tuple[tuple[str, ...], ...]
    """Names of the blocks of each stage of the rank."""


def rank_step(
    config: Config,
    spec: ModelSpec,
    degrees: ParallelDims,
    accelerator: Accelerator,
    *,
    rank: int,
    world_size: int,
    num_microbatches: int,
    logits_per_chunk: int,
    extrapolate: bool = True,
) -> RankStep:
    """Trace the step of `rank`, the first of a pipeline stage; with all blocks or, if they are
    alike, few of them."""
    stage = rank // (world_size // degrees.pp)
    stages = _stages_of(config, spec, degrees, stage)
    alike = extrapolate and _are_alike(config, spec)
    depths = _traced_depths(config, degrees, stage, num_microbatches) if alike else (degrees.pp,)

    def trace(kept: Callable[[Sequence[str]], Sequence[str]], depth: int) -> StepTrace:
        per_stage = world_size // degrees.pp
        return trace_step(
            _with_depth(config, spec, degrees, depth),
            spec,
            rank=per_stage * (stage if stage == 0 or depth == degrees.pp else depth - 1),
            world_size=per_stage * depth,
            num_microbatches=_traced_microbatches(config, depth, num_microbatches, degrees.pp),
            kept=kept,
            accelerator=accelerator,
            logits_per_chunk=logits_per_chunk,
        )

    def at_depth(kept: Callable[[Sequence[str]], Sequence[str]]) -> StepTrace | None:
        traces = [trace(kept, depth) for depth in depths]
        return traces[0] if len(traces) == 1 else _at_depth(traces, depths, degrees.pp)

    counts = _traced_blocks(config, stages.blocks) if alike else None
    if counts is not None:
        few, more = (at_depth(_keep(stages.blocks, count)) for count in counts)
        if few is not None and more is not None:
            places = {span.place for span in more.unit_spans}
            if all(span.place in places for span in few.unit_spans):
                return _extrapolated(few, more, counts, stages, rank, num_microbatches)
    whole = trace(lambda units: units, degrees.pp)
    num_blocks = sum(map(len, stages.blocks))
    return RankStep(
        rank=rank,
        stages=stages.numbers,
        num_stages=stages.total,
        points=_points(whole.unit_spans, stages.blocks),
        schedule=_of_all(whole, num_microbatches),
        update=whole.update,
        num_parameters=whole.num_parameters,
        num_slot_elements=whole.num_slot_elements,
        num_blocks=num_blocks,
        traced_blocks=(num_blocks,),
    )


def _traced_depths(
    config: Config, degrees: ParallelDims, stage: int, num_microbatches: int
) -> tuple[int, ...]:
    """Return the numbers of stages to trace with. Under 1F1B the first stage has as many
    microbatches in flight as there are stages, in which memory is affine, and the last has one."""
    few, more = _DEPTHS
    parallelism = config.parallelism
    is_plain = (
        parallelism.pipeline_parallel_schedule.lower() == "1f1b"
        and not parallelism.pipeline_parallel_schedule_csv
    )
    if not is_plain or degrees.pp <= more or num_microbatches < degrees.pp:
        return (degrees.pp,)
    return (few, more) if stage == 0 else (few,)


def _with_depth(config: Config, spec: ModelSpec, degrees: ParallelDims, depth: int) -> Config:
    """Return the configuration with fewer pipeline stages: the first and the last as they are, and
    between them what is left."""
    if depth == degrees.pp:
        return config
    modules = plan_stages(spec, config.parallelism).modules
    # With two stages, the last one begins with all blocks that the first does not have.
    first, last = modules[0], modules[-1] if depth > 2 else sum(modules[1:], ())
    middle = [sum(modules[1 : -(depth - 2)], ()), *modules[-(depth - 2) : -1]] if depth > 2 else []
    parts = [list(first), *(list(part) for part in middle), list(last)]
    parallelism = config.parallelism.model_copy(
        update={
            "pipeline_parallel_degree": depth,
            "module_fqns_per_model_part": parts,
            "data_parallel_shard_degree": degrees.dp_shard,
        }
    )
    return config.model_copy(update={"parallelism": parallelism})


def _at_depth(traces: Sequence[StepTrace], depths: Sequence[int], depth: int) -> StepTrace | None:
    """Return the trace of a first stage with `depth` stages, from two with fewer. None if they
    cannot be matched."""
    few, more = (
        {
            place: span
            for span in trace.unit_spans
            if (place := _aligned(span.place, at)) is not None
        }
        for trace, at in zip(traces, depths, strict=True)
    )
    if not few.keys() <= more.keys():
        return None
    factor = (depth - depths[0]) / (depths[1] - depths[0])
    unit_spans = tuple(
        UnitSpan(
            place=place,
            peak=_along(few[place].peak, span.peak, factor),
            end=_along(few[place].end, span.end, factor),
        )
        for place, span in more.items()
        if place in few
    )
    return replace(traces[1], unit_spans=unit_spans)


def _aligned(place: Place, depth: int) -> Place | None:
    """Return a place of a first stage under 1F1B that pipelines of other depths have too. Forwards
    count from the last one before the first backward, and earlier ones are left out: the first of
    all gathers the weights. The first two backwards have the most microbatches in flight; later
    ones count from the end, where gradients are reduced."""
    unit, phase, index = place
    if unit == ROOT:
        # What runs before the first unit runs once per step.
        return place
    if phase == "forward":
        index -= depth - 1
        return None if index < 0 else (unit, phase, index)
    return (unit, phase, index) if index < 2 else (unit, f"last {phase}", index - depth)


def _stages_of(config: Config, spec: ModelSpec, degrees: ParallelDims, pp_rank: int) -> _RankStages:
    prefix = spec.blocks.removesuffix("*")
    if degrees.pp == 1:
        blocks = [f"{prefix}{layer}" for layer in range(spec.num_layers)]
        modules, numbers = [spec.stage_units or blocks], [0]
    else:
        plan = plan_stages(spec, config.parallelism)
        modules, numbers = plan.modules, plan.of_rank(pp_rank)
    return _RankStages(
        numbers=tuple(numbers),
        total=len(modules),
        blocks=tuple(
            tuple(name for name in modules[stage] if name.startswith(prefix)) for stage in numbers
        ),
    )


def _traced_microbatches(config: Config, depth: int, num_microbatches: int, num_stages: int) -> int:
    """Return how many microbatches to trace: enough for the peak. Under 1F1B a stage has at most as
    many in flight as there are stages; schedules that may have all are traced with all."""
    if depth == 1:
        return min(num_microbatches, _MOST_MICROBATCHES)
    if config.parallelism.pipeline_parallel_schedule.lower() == "1f1b":
        # One more than in flight, because gradients exist by then.
        return depth + min(1, num_microbatches - num_stages)
    return num_microbatches


def _are_alike(config: Config, spec: ModelSpec) -> bool:
    """Whether all blocks have the same parameters."""
    if not spec.stage_units:
        return False
    prefix = spec.blocks.removesuffix("*")
    shapes: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in model_on_meta(config, spec).named_parameters():
        if name.startswith(prefix):
            block, _, rest = name.removeprefix(prefix).partition(".")
            shapes.setdefault(block, []).append((rest, parameter.shape))
    return len({tuple(shape) for shape in shapes.values()}) == 1


def _traced_blocks(config: Config, stages: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """Return how many blocks of each stage the two traces have; None if that saves nothing."""
    checkpointing = config.activation_checkpoint
    option = checkpointing.selective_ac_option
    # Every n-th block is recomputed: numbers that differ by n have the same pattern.
    period = int(option) if checkpointing.mode == "selective" and option != "op" else 1
    lengths = {len(blocks) for blocks in stages}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    few = _FEWEST_BLOCKS + (length - _FEWEST_BLOCKS) % period
    return (few, few + period) if few + period < length else None


def _keep(stages: Sequence[Sequence[str]], count: int) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that keeps, of the blocks of its units, the first and the last of each of
    `stages`, `count` in all, and whatever is not a block."""
    first = (count + 1) // 2
    chosen = {
        name
        for blocks in stages
        for name in (*blocks[:first], *blocks[len(blocks) - count + first :])
    }
    prefix = stages[0][0].rpartition(".")[0] + "."
    return lambda units: [name for name in units if name in chosen or not name.startswith(prefix)]


def _extrapolated(
    few: StepTrace,
    more: StepTrace,
    counts: tuple[int, int],
    stages: _RankStages,
    rank: int,
    num_microbatches: int,
) -> RankStep:
    factor = (len(stages.blocks[0]) - counts[0]) / (counts[1] - counts[0])
    before = {span.place: span for span in few.unit_spans}
    unit_spans = [
        replace(
            span,
            peak=_along(before[span.place].peak, span.peak, factor),
            end=_along(before[span.place].end, span.end, factor),
        )
        for span in more.unit_spans
        if span.place in before
    ]

    def along(of_few: Work, of_more: Work) -> Work:
        return of_few + (of_more - of_few) * factor

    return RankStep(
        rank=rank,
        stages=stages.numbers,
        num_stages=stages.total,
        points=_points(unit_spans, stages.blocks, counts[0]),
        schedule=along(_of_all(few, num_microbatches), _of_all(more, num_microbatches)),
        update=along(few.update, more.update),
        num_parameters=round(
            few.num_parameters + (more.num_parameters - few.num_parameters) * factor
        ),
        num_slot_elements=round(
            few.num_slot_elements + (more.num_slot_elements - few.num_slot_elements) * factor
        ),
        num_blocks=sum(map(len, stages.blocks)),
        traced_blocks=counts,
    )


def _along(few: ByKind, more: ByKind, factor: float) -> ByKind:
    return {kind: few[kind] + (more[kind] - few[kind]) * factor for kind in KINDS}


def _of_all(trace: StepTrace, num_microbatches: int) -> Work:
    """Return the work of forward and backward of all microbatches."""
    return trace.schedule + trace.microbatch * (num_microbatches - trace.num_microbatches)


def _points(
    unit_spans: Sequence[UnitSpan], stages: Sequence[Sequence[str]], num_traced: int | None = None
) -> tuple[Point, ...]:
    """Return the points at which spans have their peak, with the positions and the names that
    they have among all blocks. `stages` are the blocks of each part, of which `num_traced` were
    traced; None: all."""
    names = _layer_names(stages)
    gaps = {} if num_traced is None else _gaps(stages, num_traced)
    points, position, before = [], 0.0, ""
    for span in unit_spans:
        unit, phase, _ = span.place
        position += gaps.get(frozenset((before, unit)), 0)
        name = names.get(unit, unit)
        points.append(Point(position=position, unit=name, phase=phase, bytes=span.peak))
        points.append(Point(position=position + 1, unit=name, phase=phase, bytes=span.end))
        position, before = position + 1, unit
    return tuple(points)


def _layer_names(stages: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the name of each block in the model, by either of its labels."""
    names = {}
    for part, blocks in enumerate(stages):
        for position, block in enumerate(blocks):
            layer = f"layer {block.rpartition('.')[2]}"
            names[label_from_start(part, position)] = layer
            names[label_from_end(part, len(blocks) - 1 - position)] = layer
    return names


def _gaps(stages: Sequence[Sequence[str]], num_traced: int) -> dict[frozenset[str], int]:
    """Return how many blocks are missing between two traced ones, in either direction."""
    first = (num_traced + 1) // 2
    return {
        frozenset(
            (label_from_start(part, first - 1), label_from_end(part, num_traced - first - 1))
        ): len(blocks) - num_traced
        for part, blocks in enumerate(stages)
    }
