"""Constraints between the degrees of parallelism, the model, the batch and the sequence."""

import math
from collections.abc import Iterator

import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.data import batch_sizes
from torchtitan_lite.distributed.device import have_peer_access
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.pipeline_stages import StagePlan, plan_stages, step_order
from torchtitan_lite.parallel.tensor import every_rank_has_rows


def mesh_problems(
    config: Config, spec: ModelSpec | None, degrees: ParallelDims | None
) -> Iterator[str]:
    """Return every problem of the mesh. A check whose `spec` or `degrees` are None was reported
    before."""
    yield from pipeline_problems(config, spec, degrees)
    if degrees is not None:
        yield from _sequence_shards(config, degrees)
    if spec is not None:
        yield from _tensor_sharding(config, spec)
        yield from _vocabulary(config, spec)
        yield from _expert_sharding(config, spec)
    if spec is not None and degrees is not None:
        yield from _attention_over_ranks(config, spec, degrees)
        yield from _expert_capacity(config, spec, degrees)
    yield from _async_tensor_parallel(config)


def pipeline_problems(
    config: Config, spec: ModelSpec | None, degrees: ParallelDims | None
) -> Iterator[str]:
    """Return the problems of the batch and the stages, on which the pipeline order depends."""
    if degrees is not None:
        yield from _batch(config, degrees)
        yield from _schedule_file(config, degrees)
    if spec is not None and degrees is not None and degrees.pp > 1:
        yield from _pipeline(config, spec, degrees)


def pipeline_microbatches(config: Config, degrees: ParallelDims) -> int:
    """Return the microbatches per pipeline and step, after a warm-up of the batch size."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    return batch_sizes(config.training, degrees.batch).final // (size * degrees.batch)


def sequence_lengths(config: Config) -> dict[str, int]:
    """Return the sequence lengths of the run, by key."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len is not None:
        lengths["validation.seq_len"] = config.validation.seq_len
    return lengths


def on_gpu(config: Config) -> bool:
    """Whether the run computes on a GPU."""
    return config.job.device != "cpu" and torch.cuda.is_available()


def _batches(config: Config, degrees: ParallelDims) -> dict[str, int]:
    """Return the samples per step: of the steps of each stage of a warm-up and of those after it,
    by what sets them."""
    sizes = batch_sizes(config.training, degrees.batch)
    warmup = enumerate(size for _, size in sizes.stages)
    stages = {f"batch_size_warmup[{stage}][1]": size for stage, size in warmup}
    return {**stages, "global_batch_size": sizes.final}


def _batch(config: Config, degrees: ParallelDims) -> Iterator[str]:
    local, local_key = config.training.local_batch_size, "training.local_batch_size"
    if degrees.pp > 1:
        local = config.parallelism.pipeline_parallel_microbatch_size
        local_key = "parallelism.pipeline_parallel_microbatch_size"
    for key, batch in _batches(config, degrees).items():
        if batch % (local * degrees.batch):
            yield _uneven_batch(key, batch, local_key, local, degrees)


def _uneven_batch(key: str, batch: int, local_key: str, local: int, degrees: ParallelDims) -> str:
    at_once = local * degrees.batch
    below = batch // at_once * at_once
    remedy = f"{at_once}" if below == 0 else f"{below} or {below + at_once}"
    per_rank, rest = divmod(batch, degrees.batch)
    fitting = [size for size in range(1, min(local, per_rank) + 1) if per_rank % size == 0]
    smaller = f", or {local_key.partition('.')[2]} = {fitting[-1]}" if rest == 0 and fitting else ""
    return (
        f"training.{key} ({batch}) is not a multiple of {local_key} "
        f"({local}) x batch ranks (data_parallel_replicate {degrees.dp_replicate} x "
        f"data_parallel_shard {degrees.dp_shard} = {degrees.batch}) = {at_once}. "
        f"Set {key} = {remedy}{smaller}."
    )


def _pipeline(config: Config, spec: ModelSpec, degrees: ParallelDims) -> Iterator[str]:
    if not spec.stage_units:
        yield (
            f"The pipeline cannot split {spec.name} {spec.flavor}: it names no stage_units. "
            "Use pipeline_parallel_degree = 1."
        )
        return
    try:
        plan = plan_stages(spec, config.parallelism)
    except MeshError as error:
        yield str(error)
        return
    for key, batch in _batches(config, degrees).items():
        yield from _pipeline_batch(config, degrees, plan, key, batch)


def _pipeline_batch(
    config: Config, degrees: ParallelDims, plan: StagePlan, key: str, batch: int
) -> Iterator[str]:
    """Yield the problems of steps of `batch` samples, which `training.key` sets."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    num = batch // (size * degrees.batch)
    step = (
        f"A step of {batch} samples gives each pipeline {num} microbatches of "
        f"{size} (over {degrees.batch} batch ranks)"
    )
    if plan.order is not None and num != plan.order.num_microbatches:
        needed = plan.order.num_microbatches
        yield (
            f"{step}, but parallelism.pipeline_parallel_schedule_csv = "
            f'"{config.parallelism.pipeline_parallel_schedule_csv}" runs {needed}. Set '
            f"training.{key} = {needed * size * degrees.batch}."
        )
    if plan.order is not None:
        return
    needed = len(plan.modules)
    if num < needed:
        yield (
            f"{step}, fewer than its {needed} stages. Set "
            f"training.{key} = {needed * size * degrees.batch} or more."
        )
        return
    schedule = config.parallelism.pipeline_parallel_schedule
    try:
        step_order(plan, schedule, num)
    except MeshError as error:
        fitting = (m for m in range(num + 1, num + 2 * needed + 1) if _runs(plan, schedule, m))
        nearest = next(fitting, None)
        remedy = "" if nearest is None else f" Set {key} = {nearest * size * degrees.batch}."
        yield f"{step}. {error}{remedy}"


def _runs(plan: StagePlan, schedule: str, num_microbatches: int) -> bool:
    try:
        step_order(plan, schedule, num_microbatches)
    except MeshError:
        return False
    return True


def _schedule_file(config: Config, degrees: ParallelDims) -> Iterator[str]:
    path = config.parallelism.pipeline_parallel_schedule_csv
    if path and degrees.pp == 1:
        yield (
            f'parallelism.pipeline_parallel_schedule_csv = "{path}" has no effect without a '
            "pipeline. Set pipeline_parallel_degree to the number of its rows, or leave it out."
        )


def _sequence_shards(config: Config, degrees: ParallelDims) -> Iterator[str]:
    parallelism = config.parallelism
    # Head-tail balancing gives each rank one piece from the front and one from the back.
    pieces = 2 if parallelism.context_parallel_load_balancer == "headtail" else 1
    factors = []
    if degrees.cp > 1:
        factors += [("context_parallel_degree", degrees.cp), ("pieces per rank", pieces)]
    if degrees.tp > 1 and parallelism.enable_sequence_parallel:
        factors.append(("tensor_parallel_degree (sequence parallelism)", degrees.tp))
    divisor = math.prod(factor for _, factor in factors)
    shown = " x ".join(f"{name} ({factor})" for name, factor in factors)
    for key, length in sequence_lengths(config).items():
        if length % divisor:
            below = length // divisor * divisor
            yield (
                f"{key} ({length}) is not a multiple of {shown} = {divisor}. Set "
                f"{key.partition('.')[2]} = {below or divisor}"
                f"{f' or {below + divisor}' if below else ''}."
            )


def _tensor_sharding(config: Config, spec: ModelSpec) -> Iterator[str]:
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1 and not spec.shard_plan:
        yield (
            f"parallelism.tensor_parallel_degree ({degree}): {spec.name} {spec.flavor} has no "
            "plan for tensor parallelism. Set it to 1."
        )
    for what, size in spec.sharded_sizes:
        if size % degree:
            yield (
                f"parallelism.tensor_parallel_degree ({degree}) does not divide the {size} {what} "
                f"of {spec.name} {spec.flavor}. Degrees that do: {', '.join(_divisors(size))}."
            )


def _vocabulary(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield the problems of a sharded vocabulary."""
    degree = config.parallelism.tensor_parallel_degree
    if not every_rank_has_rows(spec.vocab_size, degree):
        fitting = next(d for d in range(degree, 0, -1) if every_rank_has_rows(spec.vocab_size, d))
        yield (
            f"parallelism.tensor_parallel_degree ({degree}) leaves the last rank none of the "
            f"{spec.vocab_size} rows of the vocabulary of {spec.name} {spec.flavor}. Set it to "
            f"{fitting}."
        )
    if degree > 1 and config.parallelism.disable_loss_parallel and spec.tied_units is not None:
        yield (
            f"parallelism.disable_loss_parallel = true: the output of {spec.name} {spec.flavor} is "
            "its embedding, which tensor parallelism shards over the vocabulary. Set it to false."
        )


def _attention_over_ranks(config: Config, spec: ModelSpec, degrees: ParallelDims) -> Iterator[str]:
    """Yield the problems of how context parallelism exchanges keys and values."""
    if degrees.cp == 1:
        return
    if config.parallelism.context_parallel_load_balancer == "ptrr":
        yield (
            'parallelism.context_parallel_load_balancer = "ptrr" is not supported by this version. '
            'Use "headtail" or "none".'
        )
    method = config.parallelism.context_parallel_rotate_method
    asked = f'parallelism.context_parallel_rotate_method = "{method}"'
    if method == "alltoall" and spec.document_mask:
        yield (
            f"{asked} (ring attention) cannot keep attention within documents, which "
            'model.attention_mask = "document" requires. Use "allgather" or "ulysses", or '
            'attention_mask = "causal".'
        )
    if method == "alltoall" and config.compile.covers("model"):
        yield (
            f'{asked} (ring attention) cannot be compiled. Use "allgather" or "ulysses", or set '
            'compile.components = ["loss"].'
        )
    is_float32 = config.training.mixed_precision_param == "float32"
    if method == "alltoall" and is_float32 and on_gpu(config):
        yield (
            f"{asked} (ring attention) computes in bfloat16 on a GPU, but "
            'training.mixed_precision_param = "float32". Set it to "bfloat16".'
        )
    for attention in spec.attentions:
        if method not in attention.rotations:
            known = " or ".join(f'"{rotation}"' for rotation in attention.rotations)
            remedy = f"Use {known}" if known else "Set context_parallel_degree = 1"
            yield (
                f"{asked} is not supported by the {attention.name} of {spec.name} {spec.flavor}. "
                f"{remedy}."
            )
    yield from _recurrences_over_ranks(config, spec, degrees)
    # Recurrences exchange states, and no heads.
    with_heads = [attention for attention in spec.attentions if not attention.carried_inputs]
    uneven = [
        attention for attention in with_heads if (attention.num_heads // degrees.tp) % degrees.cp
    ]
    if method == "ulysses" and (uneven or not with_heads):
        heads = uneven[0].num_heads // degrees.tp if uneven else 0
        yield (
            f"{asked} splits the {heads} heads that each tp rank of {spec.name} {spec.flavor} has "
            f"over context_parallel_degree ({degrees.cp}) ranks, which does not divide them. "
            f'Degrees that do: {", ".join(_divisors(heads)) or "none"}; or use "allgather".'
        )


def _recurrences_over_ranks(
    config: Config, spec: ModelSpec, degrees: ParallelDims
) -> Iterator[str]:
    """Yield the problem of a piece of a sequence that is shorter than a convolution."""
    is_balanced = config.parallelism.context_parallel_load_balancer == "headtail"
    pieces = degrees.cp * (2 if is_balanced else 1)
    needed = max((attention.carried_inputs for attention in spec.attentions), default=0)
    for key, length in sequence_lengths(config).items():
        if length // pieces < needed:
            yield (
                f"{key} ({length}) leaves {length // pieces} positions for each of the {pieces} "
                f"pieces of a sequence over context_parallel_degree ({degrees.cp}) ranks, and the "
                f"convolutions of {spec.name} {spec.flavor} read {needed} of the piece before. Set "
                f"it to at least {needed * pieces}, or lower the degree."
            )


def _expert_capacity(config: Config, spec: ModelSpec, degrees: ParallelDims) -> Iterator[str]:
    """Yield the problem of an expert capacity, which is a fraction of an entire sequence."""
    axes = ["cp"] if degrees.cp > 1 else []
    if degrees.tp > 1 and config.parallelism.enable_sequence_parallel:
        axes.append("tp")
    if axes and spec.expert_capacity_factor is not None:
        yield (
            f"An expert's capacity (capacity_factor = {spec.expert_capacity_factor}) is a "
            f"fraction of a full sequence, of which the ranks of {' and '.join(axes)} have only "
            "parts. Leave the capacity unset, or disable context and sequence parallelism."
        )


def _async_tensor_parallel(config: Config) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    missing = []
    if config.parallelism.tensor_parallel_degree == 1:
        missing.append("tensor_parallel_degree above 1")
    if not config.compile.covers("model"):
        missing.append('compile.enable = true with "model" among compile.components')
    if not (on_gpu(config) and have_peer_access()):
        missing.append("GPUs that reach each other's memory (CUDA symmetric memory)")
    if missing:
        yield (
            f"parallelism.enable_async_tensor_parallel = true needs {', and '.join(missing)}. Set "
            "it to false."
        )


def _expert_sharding(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield expert degrees without experts, or that do not divide them."""
    parallelism = config.parallelism
    sizes = {
        "expert_parallel_degree": ("experts", spec.num_experts),
        "expert_tensor_parallel_degree": ("features of an expert", spec.expert_width),
    }
    for key, (what, size) in sizes.items():
        degree = getattr(parallelism, key)
        if degree > 1 and not spec.num_experts:
            yield (
                f"parallelism.{key} ({degree}): {spec.name} {spec.flavor} has no experts. Set it "
                "to 1, or choose a flavor with experts (MoE)."
            )
        elif size % degree:
            yield (
                f"parallelism.{key} ({degree}) does not divide the {size} {what} of {spec.name} "
                f"{spec.flavor}. Degrees that do: {', '.join(_divisors(size))}."
            )


def _divisors(size: int) -> list[str]:
    """Format the divisors of a size, up to a reasonable degree."""
    return [str(degree) for degree in range(1, min(size, 64) + 1) if size % degree == 0]
