"""The stages of a pipeline: the modules per stage, the stages per rank, their order in a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import schedule_actions
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.pipeline_order import Action, Kind, PipelineOrder, read_order

_V_SHAPED = {"zbvzerobubble", "dualpipev"}
_ONE_STAGE_PER_RANK = {"1f1b", "gpipe"}
_TWO_STAGES_PER_RANK = {"interleaved1f1b", "loopedbfs", "interleavedzerobubble"} | _V_SHAPED
SCHEDULES = sorted(_ONE_STAGE_PER_RANK | _TWO_STAGES_PER_RANK)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The stages of a model."""

    modules: tuple[tuple[str, ...], ...]
    """Module names per stage, in the order of forward."""
    ranks: tuple[int, ...]
    """The pp rank that holds each stage."""
    order: PipelineOrder | None = None
    """Order from a file; None for the order of torch's schedule of the configured name."""

    def stage_of(self, module: str) -> int:
        """Return the stage that owns a module."""
        return next(stage for stage, names in enumerate(self.modules) if module in names)

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages that a pp rank holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]


def plan_stages(spec: ModelSpec, parallelism: ParallelismConfig) -> StagePlan:
    """Partition the model into stages: by `module_fqns_per_model_part`, else by layer counts in
    which the embedding and the output count as many layers as configured.

    Raises MeshError if the schedule is unknown, its file is invalid, or there are too few layers or
    named stages.
    """
    degree = parallelism.pipeline_parallel_degree
    if parallelism.pipeline_parallel_schedule_csv:
        return _plan_of_file(spec, parallelism, parallelism.pipeline_parallel_schedule_csv)
    schedule = parallelism.pipeline_parallel_schedule.lower()
    if schedule not in SCHEDULES:
        raise MeshError(
            f'parallelism.pipeline_parallel_schedule = "{parallelism.pipeline_parallel_schedule}" '
            f"is not one of {', '.join(SCHEDULES)} (in any case)."
        )
    per_rank = 2 if schedule in _TWO_STAGES_PER_RANK else 1
    modules = _modules_per_stage(
        spec, parallelism, _num_stages(spec, parallelism, degree * per_rank)
    )
    if len(modules) % degree or (schedule in _ONE_STAGE_PER_RANK and len(modules) != degree):
        wanted = f"{degree}" if schedule in _ONE_STAGE_PER_RANK else f"a multiple of {degree}"
        raise MeshError(
            f"{len(modules)} stages cannot be shared by pipeline_parallel_degree = {degree} ranks "
            f"under the schedule {parallelism.pipeline_parallel_schedule}, which needs {wanted}."
        )
    if schedule in _V_SHAPED and len(modules) != 2 * degree:
        raise MeshError(
            f"The schedule {parallelism.pipeline_parallel_schedule} needs two stages per rank, "
            f"{2 * degree} in all, but there are {len(modules)}."
        )
    ranks = [
        2 * degree - 1 - stage if schedule in _V_SHAPED and stage >= degree else stage % degree
        for stage in range(len(modules))
    ]
    return StagePlan(modules=modules, ranks=tuple(ranks))


def stage_weights(
    plan: StagePlan, spec: ModelSpec, parallelism: ParallelismConfig
) -> tuple[int, ...]:
    """Return the weight of each stage in layers, counting the embedding and the output as
    configured."""
    weights = [sum(_is_layer(name, spec) for name in names) for names in plan.modules]
    weights[0] += parallelism.pipeline_parallel_first_stage_less_layers
    weights[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    return tuple(weights)


def shared_weights(
    plan: StagePlan, spec: ModelSpec
) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    """Return the weights that two stages share: the modules that hold the weight and its copy, and
    their stages."""
    last = len(plan.modules) - 1
    pairs = [(unit, unit, last) for unit in spec.copied_units]
    if spec.tied_units is not None:
        owner, copy = spec.tied_units
        pairs.append((owner, copy, plan.stage_of(copy)))
    held = [((owner, copy), (plan.stage_of(owner), stage)) for owner, copy, stage in pairs]
    return [(units, stages) for units, stages in held if stages[0] != stages[1]]


def stage_modules(plan: StagePlan, spec: ModelSpec, stage: int) -> tuple[str, ...]:
    """Return the units that a stage holds, those that are copies included."""
    is_last = stage == len(plan.modules) - 1
    copies = [unit for unit in spec.copied_units if unit not in plan.modules[stage]]
    return (*(copies if is_last else ()), *plan.modules[stage])


def keep_only(model: nn.Module, spec: ModelSpec, modules: Sequence[str]) -> None:
    """Remove the units of other stages from `model`; names do not change."""
    for name in spec.stage_units:
        if name in modules:
            continue
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(parent, nn.ModuleDict):
            del parent[leaf]
        else:
            setattr(parent, leaf, None)


def join_stages(parts: Sequence[nn.Module], spec: ModelSpec, mesh: Mesh) -> nn.Module:
    """Return the stages of this rank as one module whose parameters have their names in the entire
    model, without copies of weights of an earlier stage. It is for state only; forward runs the
    parts.
    """
    if mesh.degrees.pp == 1:
        return parts[0]
    whole = nn.Module()
    owner, copy = spec.tied_units or ("", "")
    for part in parts:
        children = dict(part.named_children())
        copies = spec.copied_units if spec.stage_units[-1] in children else ()
        for name, child in children.items():
            held = getattr(whole, name, None)
            if name == copy and owner not in children:
                continue
            if name in copies:
                continue
            if isinstance(child, nn.ModuleDict) and isinstance(held, nn.ModuleDict):
                held.update(dict(child.items()))
            elif isinstance(child, nn.ModuleDict):
                whole.add_module(name, nn.ModuleDict(dict(child.items())))
            elif held is None:
                whole.add_module(name, child)
    return whole


def _plan_of_file(spec: ModelSpec, parallelism: ParallelismConfig, path: str) -> StagePlan:
    order = read_order(path, parallelism.pipeline_parallel_degree)
    modules = _modules_per_stage(
        spec, parallelism, _num_stages(spec, parallelism, order.num_stages)
    )
    if len(modules) != order.num_stages:
        key = (
            "module_fqns_per_model_part"
            if parallelism.module_fqns_per_model_part is not None
            else "pipeline_parallel_layers_per_stage"
        )
        raise MeshError(
            f'parallelism.pipeline_parallel_schedule_csv = "{path}" has {order.num_stages} stages, '
            f"but parallelism.{key} makes {len(modules)}. Leave it out, or make it fit."
        )
    return StagePlan(modules=modules, ranks=order.ranks, order=order)


def _modules_per_stage(
    spec: ModelSpec, parallelism: ParallelismConfig, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """Return the module names per stage: as configured, else `num_stages` by layer counts."""
    if parallelism.module_fqns_per_model_part is None:
        return _by_layer_counts(spec, parallelism, num_stages)
    modules = tuple(map(tuple, parallelism.module_fqns_per_model_part))
    _check_named(modules, spec.stage_units)
    _check_predictions(modules, spec)
    return modules


def _num_stages(spec: ModelSpec, parallelism: ParallelismConfig, default: int) -> int:
    """Return the number of stages by `pipeline_parallel_layers_per_stage`, else `default`."""
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    return default if per_stage is None else -(-_total_weight(spec, parallelism) // per_stage)


def _total_weight(spec: ModelSpec, parallelism: ParallelismConfig) -> int:
    return (
        spec.num_layers
        + parallelism.pipeline_parallel_first_stage_less_layers
        + parallelism.pipeline_parallel_last_stage_less_layers
    )


def _by_layer_counts(
    spec: ModelSpec, parallelism: ParallelismConfig, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    total = _total_weight(spec, parallelism)
    counts = _even_counts(total, num_stages)
    # Modules of multi-token prediction are layers of the last stage.
    num_predictions = len(spec.prediction_units)
    of_last = parallelism.pipeline_parallel_last_stage_less_layers + num_predictions
    if num_predictions and counts[-1] < of_last:
        counts = [*_even_counts(total - of_last, num_stages - 1), of_last]
    counts[0] -= parallelism.pipeline_parallel_first_stage_less_layers
    counts[-1] -= of_last
    if min(counts) < 0 or (num_stages > 2 and min(counts[1:-1]) < 1):
        degree = parallelism.pipeline_parallel_degree
        most = spec.num_layers // degree * degree
        remedy = (
            f"Use at most {most} stages"
            if most
            else f"Set pipeline_parallel_degree to at most {spec.num_layers}"
        )
        raise MeshError(
            f"{spec.num_layers} layers of {spec.name} {spec.flavor} do not suffice for "
            f"{num_stages} stages when the embedding counts as "
            f"{parallelism.pipeline_parallel_first_stage_less_layers} and the output as "
            f"{parallelism.pipeline_parallel_last_stage_less_layers} layers. {remedy}, "
            "or lower "
            "pipeline_parallel_first_stage_less_layers and _last_stage_less_layers."
        )
    units = list(spec.stage_units)
    first_layer = next(i for i, name in enumerate(units) if _is_layer(name, spec))
    layers = [name for name in units if _is_layer(name, spec) and name not in spec.prediction_units]
    head, tail = units[:first_layer], units[first_layer + len(layers) :]
    stages: list[tuple[str, ...]] = []
    taken = 0
    for count in counts:
        stages.append(tuple(layers[taken : taken + count]))
        taken += count
    stages[0] = (*head, *stages[0])
    stages[-1] = (*stages[-1], *tail)
    return tuple(stages)


def _even_counts(total: int, num_stages: int) -> list[int]:
    share, rest = divmod(total, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def _check_predictions(modules: Sequence[Sequence[str]], spec: ModelSpec) -> None:
    """Raise MeshError if a module of multi-token prediction is not on the last stage: it works on
    the hidden states behind the last norm, and with the output."""
    elsewhere = [unit for unit in spec.prediction_units if unit not in modules[-1]]
    if elsewhere:
        raise MeshError(
            f"{', '.join(elsewhere)} of {spec.name} {spec.flavor} predict further tokens "
            f"(mtp_depth = {len(spec.prediction_units)}) and must be on the last stage, which has "
            f"{', '.join(modules[-1])}. Move them there in parallelism.module_fqns_per_model_part."
        )


def _is_layer(name: str, spec: ModelSpec) -> bool:
    return name.startswith(spec.blocks.removesuffix("*"))


def _check_named(modules: Sequence[Sequence[str]], order: Sequence[str]) -> None:
    named = [name for stage in modules for name in stage]
    if named != list(order):
        missing, unknown = set(order) - set(named), set(named) - set(order)
        problem = (
            f"leaves out {', '.join(sorted(missing))}"
            if missing
            else f"names {', '.join(sorted(unknown))}, which the model does not have"
            if unknown
            else "does not keep the order of forward, or names a module twice"
        )
        raise MeshError(
            f"parallelism.module_fqns_per_model_part {problem}. All stages together must name "
            f"{', '.join(order)}, in this order."
        )


def step_order(plan: StagePlan, schedule: str, num_microbatches: int) -> PipelineOrder:
    """Return the order in which a pipeline of `plan` runs a step. Raises MeshError if the schedule
    does not support that many microbatches."""
    if plan.order is not None:
        return plan.order
    num_ranks, num_stages = max(plan.ranks) + 1, len(plan.ranks)
    if schedule.lower() == "1f1b":
        return _one_forward_one_backward(num_ranks, num_microbatches)
    try:
        rows = schedule_actions(schedule, num_ranks, num_stages, num_microbatches)
    except ValueError as error:
        raise unsupported_microbatches(schedule, num_microbatches, num_stages, error) from None
    return PipelineOrder(
        tuple(
            tuple(Action(stage, cast(Kind, kind), microbatch) for stage, kind, microbatch in row)
            for row in rows
        )
    )


def unsupported_microbatches(
    schedule: str, num_microbatches: int, num_stages: int, error: ValueError
) -> MeshError:
    """Return the error for a number of microbatches that the schedule does not support."""
    return MeshError(
        f"The schedule {schedule} cannot run {num_microbatches} microbatches through {num_stages} "
        f"stages: {str(error).rstrip('.')}. Change training.global_batch_size or "
        "pipeline_parallel_microbatch_size."
    )


def _one_forward_one_backward(num_ranks: int, num_microbatches: int) -> PipelineOrder:
    """Return the order that torch's 1F1B runs. The one that its class shows (torch 2.13) counts the
    forwards of the last rank from 1, and is not what it runs."""
    rows = []
    for rank in range(num_ranks):
        ahead = min(num_microbatches, num_ranks - rank)
        row = [Action(rank, "F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            row.append(Action(rank, "B", microbatch))
            if ahead + microbatch < num_microbatches:
                row.append(Action(rank, "F", ahead + microbatch))
        rows.append(tuple(row))
    return PipelineOrder(tuple(rows))
