"""Values that depend on each other, on the number of processes, or on the machine.

All checks run and every problem is reported at once, with its numbers and what to change.
Layer: above schema.
"""

import math
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import torch

from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.device import gpus_reach_each_other
from torchtitan_lite.errors import ConfigError, MeshError
from torchtitan_lite.mesh import Degrees, resolve_degrees
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel.float8 import why_not
from torchtitan_lite.parallel.stages import plan_stages
from torchtitan_lite.section import toml_literal
from torchtitan_lite.spec import ModelSpec


def check_against(config: Config, world_size: int) -> None:
    """Check what no section can check alone, for a run of `world_size` processes.

    Raises ConfigError that names every problem. Reads the file system; starts nothing.
    """
    problems, degrees, spec = _mesh_and_model(config, world_size)
    if degrees is not None:
        problems += _batch(config, degrees)
        problems += _sequence_shards(config, degrees)
        problems += _schedule_file(config, degrees)
    if spec is not None and degrees is not None and degrees.pp > 1:
        problems += _pipeline(config, spec, degrees)
    if spec is not None:
        problems += _sequence_length(config, spec)
        problems += _tensor_cuts(config, spec)
        problems += _expert_cuts(config, spec)
        problems += _attention(config, spec)
    problems += _compiled(config)
    problems += _traced_step(config)
    problems += _async_tensor_parallel(config)
    problems += _float8(config)
    problems += _device(config)
    problems += _validation(config)
    problems += _checkpoint(config)
    problems += _files(config)
    if problems:
        raise config_error(problems)


def check_pipeline(config: Config, world_size: int) -> None:
    """The part of `check_against` on which the order of a pipeline depends: mesh, model, batch and
    stages, but neither data nor devices."""
    problems, degrees, spec = _mesh_and_model(config, world_size)
    if degrees is not None:
        problems += _batch(config, degrees)
        problems += _schedule_file(config, degrees)
    if spec is not None and degrees is not None and degrees.pp > 1:
        problems += _pipeline(config, spec, degrees)
    if problems:
        raise config_error(problems)


def _mesh_and_model(
    config: Config, world_size: int
) -> tuple[list[str], Degrees | None, ModelSpec | None]:
    """What most checks need, and the problems where there is none."""
    problems: list[str] = []
    degrees = spec = None
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except MeshError as error:
        problems.append(str(error))
    try:
        spec = model_spec(config.model)
    except ConfigError as error:
        problems.append(str(error))
    return problems, degrees, spec


def pipeline_microbatches(config: Config, degrees: Degrees) -> int:
    """How many microbatches go through each pipeline in a step."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    return _samples_a_step(config, degrees) // (size * degrees.batch)


def _samples_a_step(config: Config, degrees: Degrees) -> int:
    batch = config.training.global_batch_size
    return config.training.local_batch_size * degrees.batch if batch == -1 else batch


def _batch(config: Config, degrees: Degrees) -> Iterator[str]:
    batch, local = _samples_a_step(config, degrees), config.training.local_batch_size
    key = "training.local_batch_size"
    if degrees.pp > 1:
        local = config.parallelism.pipeline_parallel_microbatch_size
        key = "parallelism.pipeline_parallel_microbatch_size"
    at_once = local * degrees.batch
    if batch % at_once == 0:
        return
    below = batch // at_once * at_once
    remedy = f"{at_once}" if below == 0 else f"{below} or {below + at_once}"
    per_rank, rest = divmod(batch, degrees.batch)
    fitting = [size for size in range(1, min(local, per_rank) + 1) if per_rank % size == 0]
    smaller = f", or {key.partition('.')[2]} = {fitting[-1]}" if rest == 0 and fitting else ""
    yield (
        f"training.global_batch_size ({batch}) is not a multiple of {key} "
        f"({local}) x batch ranks (data_parallel_replicate {degrees.dp_replicate} x "
        f"data_parallel_shard {degrees.dp_shard} = {degrees.batch}) = {at_once}. "
        f"Set global_batch_size = {remedy}{smaller}."
    )


def _pipeline(config: Config, spec: ModelSpec, degrees: Degrees) -> Iterator[str]:
    if not spec.stage_units:
        yield (
            f"The pipeline cannot share out {spec.name} {spec.flavor}: it names no stage_units. "
            "Use pipeline_parallel_degree = 1."
        )
        return
    try:
        plan = plan_stages(spec, config.parallelism)
    except MeshError as error:
        yield str(error)
        return
    size = config.parallelism.pipeline_parallel_microbatch_size
    batch, num = _samples_a_step(config, degrees), pipeline_microbatches(config, degrees)
    given = (
        f"A step of {batch} samples gives each pipeline {num} microbatches of "
        f"{size} (over {degrees.batch} batch ranks)"
    )
    if plan.order is not None and num != plan.order.num_microbatches:
        needed = plan.order.num_microbatches
        yield (
            f"{given}, but parallelism.pipeline_parallel_schedule_csv = "
            f'"{config.parallelism.pipeline_parallel_schedule_csv}" runs {needed}. Set '
            f"training.global_batch_size = {needed * size * degrees.batch}."
        )
    if plan.order is None and num < len(plan.modules):
        needed = len(plan.modules)
        yield (
            f"{given}, fewer than its {needed} stages. Set "
            f"training.global_batch_size = {needed * size * degrees.batch} or more."
        )


def _schedule_file(config: Config, degrees: Degrees) -> Iterator[str]:
    path = config.parallelism.pipeline_parallel_schedule_csv
    if path and degrees.pp == 1:
        yield (
            f'parallelism.pipeline_parallel_schedule_csv = "{path}" has no effect without a '
            "pipeline. Set pipeline_parallel_degree to the number of its rows, or leave it out."
        )


def _sequence_shards(config: Config, degrees: Degrees) -> Iterator[str]:
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
    for key, length in _lengths(config).items():
        if length % divisor:
            below = length // divisor * divisor
            yield (
                f"{key} ({length}) is not a multiple of {shown} = {divisor}. Set "
                f"{key.partition('.')[2]} = {below or divisor}"
                f"{f' or {below + divisor}' if below else ''}."
            )


def _lengths(config: Config) -> dict[str, int]:
    """The lengths of the sequences of the run, by key."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len is not None:
        lengths["validation.seq_len"] = config.validation.seq_len
    return lengths


def _sequence_length(config: Config, spec: ModelSpec) -> Iterator[str]:
    for key, length in _lengths(config).items():
        if length > spec.max_seq_len:
            yield (
                f"{key} ({length}) is above the {spec.max_seq_len} positions of {spec.name} "
                f"{spec.flavor}. Set {key} to at most {spec.max_seq_len}, or choose a flavor with "
                "a longer context."
            )


def _tensor_cuts(config: Config, spec: ModelSpec) -> Iterator[str]:
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1 and not spec.shard_plan:
        yield (
            f"parallelism.tensor_parallel_degree ({degree}): {spec.name} {spec.flavor} has no plan "
            "of how tensor parallelism cuts it. Set it to 1."
        )
    for what, size in spec.cut_sizes:
        if size % degree:
            yield (
                f"parallelism.tensor_parallel_degree ({degree}) does not divide the {size} {what} "
                f"of {spec.name} {spec.flavor}. Degrees that do: {', '.join(_divisors(size))}."
            )


def _async_tensor_parallel(config: Config) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    missing = []
    if config.parallelism.tensor_parallel_degree == 1:
        missing.append("tensor_parallel_degree above 1")
    if not config.compile.enable or "model" not in config.compile.components:
        missing.append('compile.enable = true with "model" among compile.components')
    if not (_on_gpu(config) and gpus_reach_each_other()):
        missing.append("GPUs that reach each other's memory (CUDA symmetric memory)")
    if missing:
        yield (
            f"parallelism.enable_async_tensor_parallel = true needs {', and '.join(missing)}. Set "
            "it to false."
        )


def _float8(config: Config) -> Iterator[str]:
    if not config.model.converters:
        return
    problem = why_not(
        config.quantize.linear.float8,
        on_gpu=_on_gpu(config),
        tensor_parallel_degree=config.parallelism.tensor_parallel_degree,
    )
    if problem is not None:
        yield f"model.converters = {toml_literal(config.model.converters)}: {problem}."


def _expert_cuts(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Degrees of experts without experts to share, or that do not divide them."""
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
                "to 1, or choose a flavor with a mixture of experts."
            )
        elif size % degree:
            yield (
                f"parallelism.{key} ({degree}) does not divide the {size} {what} of {spec.name} "
                f"{spec.flavor}. Degrees that do: {', '.join(_divisors(size))}."
            )


def _divisors(size: int) -> list[str]:
    """The degrees that divide a size, as far as anyone would ask."""
    return [str(degree) for degree in range(1, min(size, 64) + 1) if size % degree == 0]


def _attention(config: Config, spec: ModelSpec) -> Iterator[str]:
    backend = getattr(spec.dims, "attention_backend", config.model.attention_backend)
    if backend == "flex" and not _on_gpu(config):
        asked = (
            'model.attention_backend = "flex"'
            if config.model.attention_backend == "flex"
            else f'model.flavor = "{spec.flavor}" (attention "flex")'
        )
        why = "there is none" if not torch.cuda.is_available() else 'job.device is "cpu"'
        yield f'{asked} needs a GPU, but {why}. Set model.attention_backend = "sdpa".'


def _compiled(config: Config) -> Iterator[str]:
    keys = ("explicit_redistribution", "trace_communication")
    asked = [key for key in keys if getattr(config.debug, key)]
    if config.compile.enable and asked:
        yield (
            f"{' and '.join(f'debug.{key} = true' for key in asked)} cannot see into compiled "
            "blocks. Set compile.enable = false, or switch it off."
        )


def _traced_step(config: Config) -> Iterator[str]:
    step, steps = config.debug.trace_communication_step, config.training.steps
    if config.debug.trace_communication and step is not None and step > steps:
        yield (
            f"debug.trace_communication_step ({step}) is above training.steps ({steps}). Set it to "
            f"at most {steps}."
        )


def _device(config: Config) -> Iterator[str]:
    if config.job.device == "cuda" and not torch.cuda.is_available():
        yield 'job.device = "cuda", but there is no GPU. Set job.device = "auto" or "cpu".'


def _on_gpu(config: Config) -> bool:
    return config.job.device != "cpu" and torch.cuda.is_available()


def _validation(config: Config) -> Iterator[str]:
    validation = config.validation
    if validation.enable and validation.corpus() is None and not config.training.held_out_fraction:
        yield (
            "validation.enable = true, but there is nothing to validate on: validation.dataset and "
            "validation.dataset_path are unset and training.held_out_fraction is 0. Set one of "
            "them (held_out_fraction = 0.01 keeps 1 % of the documents out of training)."
        )


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.enable or checkpoint.load_only:
        return
    asked = []
    if checkpoint.load_step >= 0:
        asked.append(f"checkpoint.load_step = {checkpoint.load_step}")
    if checkpoint.initial_load_path is not None:
        asked.append(f'checkpoint.initial_load_path = "{checkpoint.initial_load_path}"')
    if asked:
        yield (
            f"{' and '.join(asked)} {'have' if len(asked) > 1 else 'has'} no effect while "
            "checkpoint.enable is false. Set checkpoint.enable = true, or checkpoint.load_only = "
            "true to save nothing."
        )


def _files(config: Config) -> Iterator[str]:
    paths = {
        "model.hf_assets_path": config.model.hf_assets_path,
        "training.dataset_path": config.training.dataset_path,
        "validation.dataset_path": config.validation.dataset_path,
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path,
    }
    for index, corpus in enumerate(config.training.corpora):
        paths[f"training.corpora[{index}].dataset_path"] = corpus.dataset_path
    for key, path in paths.items():
        # A URL is looked up by fsspec when it is read.
        if path is None or "://" in path or glob(str(Path(path).expanduser()), recursive=True):
            continue
        relative = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
        yield f'{key} = "{path}": nothing there{relative}.'
