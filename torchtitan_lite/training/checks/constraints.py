"""Constraints between sections, with the number of processes, and with the machine.

All checks run and every problem is reported at once, with its values and what to change. Checks of
degrees of parallelism are in `mesh_constraints`.
"""

import os
from collections.abc import Iterator

import torch

from torchtitan_lite.checkpoint.convert.hugging_face import HuggingFaceFolder, is_hugging_face
from torchtitan_lite.checkpoint.storage import open_parent_storage
from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.section import toml_literal
from torchtitan_lite.config.tables.training import CROSS_ENTROPY
from torchtitan_lite.core.errors import CheckpointError, ConfigError, MeshError
from torchtitan_lite.core.optional_dependencies import missing
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.distributed.mesh import ParallelDims, resolve_degrees
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.models import check_family
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.optim.optimizer import name_problem
from torchtitan_lite.parallel.float8 import unsupported_reason
from torchtitan_lite.training.checks.checkpoint_constraints import checkpoint_problems
from torchtitan_lite.training.checks.data_constraints import data_problems
from torchtitan_lite.training.checks.mesh_constraints import (
    mesh_problems,
    on_gpu,
    pipeline_problems,
    sequence_lengths,
)
from torchtitan_lite.training.trained_model import trained_spec


def check_against(config: Config, world_size: int) -> None:
    """Check constraints between sections, for a run of `world_size` processes.

    Raises ConfigError with every problem. Reads the file system; starts nothing.
    """
    problems, degrees, spec = _mesh_and_model(config, world_size)
    problems += mesh_problems(config, spec, degrees)
    if spec is not None:
        problems += _sequence_length(config, spec)
        problems += _attention(config, spec)
        problems += _predictions(config, spec)
    problems += _loss(config, spec, degrees)
    problems += _optimizer(config)
    problems += _compiled(config)
    problems += _traced_step(config)
    problems += _float8(config)
    problems += _lora(config, spec)
    problems += _device(config)
    problems += data_problems(config)
    problems += checkpoint_problems(config, spec)
    problems += _anomalies(config)
    problems += _replicas(config)
    problems += semi_sync_problems(config)
    if problems:
        raise config_error(problems)


def check_mesh(config: Config, world_size: int) -> None:
    """Check mesh, model, batch and sequence length, but neither data nor devices."""
    problems, degrees, spec = _mesh_and_model(config, world_size)
    problems += mesh_problems(config, spec, degrees)
    if spec is not None:
        problems += _sequence_length(config, spec)
    if problems:
        raise config_error(problems)


def check_pipeline(config: Config, world_size: int) -> None:
    """Check what the pipeline order depends on: mesh, model, batch and stages, but neither data nor
    devices."""
    problems, degrees, spec = _mesh_and_model(config, world_size)
    problems += pipeline_problems(config, spec, degrees)
    if problems:
        raise config_error(problems)


def _mesh_and_model(
    config: Config, world_size: int
) -> tuple[list[str], ParallelDims | None, ModelSpec | None]:
    """Return problems, degrees and spec. Raises ConfigError for an unknown model family at once,
    because other problems depend on the model."""
    check_family(config.model)
    problems: list[str] = []
    degrees = spec = None
    try:
        degrees = resolve_degrees(config.parallelism, world_size)
    except MeshError as error:
        problems.append(str(error))
    try:
        spec = trained_spec(config)
    except ConfigError as error:
        problems.append(str(error))
    return problems, degrees, spec


def _predictions(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield the layers of multi-token prediction that a Hugging Face folder lacks. Other weights
    are checked when they are loaded."""
    path = config.checkpoint.initial_load_path
    if path is None or not spec.prediction_units:
        return
    try:
        opened = open_parent_storage(path)
        if not is_hugging_face(*opened):
            return
        keys = HuggingFaceFolder(*opened).tensors
    except (CheckpointError, ConfigError, OSError):
        # Reported where it is loaded, which a run that resumes does not do.
        return
    missing = [
        unit
        for unit in spec.prediction_units
        if not any(key.startswith(f"model.{unit}.") for key in keys)
    ]
    if missing:
        held = len(spec.prediction_units) - len(missing)
        yield (
            f"model.mtp_depth = {len(spec.prediction_units)}, but checkpoint.initial_load_path = "
            f'"{path}" has {held or "no"} layers of multi-token prediction (no '
            f"{', '.join(f'model.{unit}' for unit in missing)}). Set model.mtp_depth = {held}."
        )


def _sequence_length(config: Config, spec: ModelSpec) -> Iterator[str]:
    for key, length in sequence_lengths(config).items():
        if length > spec.max_seq_len:
            yield (
                f"{key} ({length}) is above the {spec.max_seq_len} positions of {spec.name} "
                f"{spec.flavor}. Set {key} to at most {spec.max_seq_len}, or choose a flavor with "
                "a longer context."
            )


def _loss(config: Config, spec: ModelSpec | None, degrees: ParallelDims | None) -> Iterator[str]:
    training = config.training
    if training.loss == CROSS_ENTROPY:
        return
    asked = f'training.loss = "{training.loss}"'
    if training.loss not in REGISTRY.losses:
        names = ", ".join([CROSS_ENTROPY, *sorted(REGISTRY.losses)])
        yield (
            f"{asked} is not one of {names}. Set experimental.custom_import to the module that "
            "registers it."
        )
    if degrees is not None and degrees.pp > 1:
        yield f"{asked} does not support pipeline_parallel_degree = {degrees.pp}. Set it to 1."
    if spec is not None and spec.prediction_units:
        yield f"{asked} does not support multi-token prediction. Set mtp_depth to 0."
    if spec is not None and spec.logits_soft_cap is not None:
        yield (
            f"{asked} does not support the soft cap of logits ({spec.logits_soft_cap}) of "
            f"{spec.name} {spec.flavor}. Choose another model, or cross_entropy."
        )
    if training.z_loss_weight:
        yield (
            f"{asked} has no z-loss: training.z_loss_weight = {training.z_loss_weight} has no "
            "effect. Set it to 0."
        )


def _float8(config: Config) -> Iterator[str]:
    if not config.model.uses_float8:
        return
    problem = unsupported_reason(
        config.quantize.linear.float8,
        on_gpu=on_gpu(config),
        tensor_parallel_degree=config.parallelism.tensor_parallel_degree,
    )
    if problem is not None:
        yield f"model.converters = {toml_literal(config.model.converters)}: {problem}."


def _lora(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    lora = config.lora
    if not config.model.uses_lora:
        asked = [
            f"lora.{key} = {toml_literal(getattr(lora, key))}"
            for key, field in type(lora).model_fields.items()
            if getattr(lora, key) != field.default
        ]
        if asked:
            yield (
                f"{' and '.join(asked)} {'have' if len(asked) > 1 else 'has'} no effect without "
                '"lora" in model.converters. Add it, or omit the table [lora].'
            )
        return
    asked = 'model.converters = ["lora"]'
    if config.model.uses_float8:
        yield (
            f"{toml_literal(config.model.converters)} in model.converters: adapters do not support "
            "float8 linears. Choose one of the two."
        )
    if config.checkpoint.initial_load_path is None:
        yield (
            f"{asked} trains adapters of given weights, and there are none. Set "
            "checkpoint.initial_load_path to a Hugging Face folder or a checkpoint."
        )
    if not config.checkpoint.initial_load_model_only:
        yield (
            f"{asked} loads only the weights of checkpoint.initial_load_path. Set "
            "checkpoint.initial_load_model_only = true."
        )
    if config.optimizer.name == "Muon":
        yield (
            f'{asked} and optimizer.name = "Muon": Muon is for the matrices of hidden layers, '
            'which are frozen. Set optimizer.name = "AdamW".'
        )
    if config.fault_tolerance.semi_sync_method is not None:
        yield (
            f"{asked} and fault_tolerance.semi_sync_method = "
            f"{toml_literal(config.fault_tolerance.semi_sync_method)}: only replicas that reduce "
            "every step support adapters. Leave semi_sync_method out."
        )
    moe = None if spec is None else getattr(spec.dims, "moe", None)
    if moe is not None and moe.bias_update_rate:
        yield (
            f"{asked} freezes the biases of routers, and they change by {moe.bias_update_rate} per "
            "step. Set model.router_bias_update_rate = 0."
        )


def _attention(config: Config, spec: ModelSpec) -> Iterator[str]:
    backend = getattr(spec.dims, "attention_backend", config.model.attention_backend)
    if backend == "flex" and not on_gpu(config):
        asked = (
            'model.attention_backend = "flex"'
            if config.model.attention_backend == "flex"
            else f'model.flavor = "{spec.flavor}" (attention "flex")'
        )
        why = "there is none" if not torch.cuda.is_available() else 'job.device is "cpu"'
        yield f'{asked} needs a GPU, but {why}. Set model.attention_backend = "sdpa".'
    if backend == "flex" and config.debug.trace_communication:
        yield (
            "debug.trace_communication = true would run FlexAttention without its compiled kernel, "
            'and report its memory wrongly. Set model.attention_backend = "sdpa" for the trace.'
        )


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if problem := name_problem(optimizer.name):
        yield problem
    asked = [
        f"optimizer.{key} = {toml_literal(getattr(optimizer, key))}"
        for key, field in type(optimizer).model_fields.items()
        if key.startswith(("muon_", "adamw_")) and getattr(optimizer, key) != field.default
    ]
    if asked and optimizer.name != "Muon":
        yield (
            f"{' and '.join(asked)} {'have' if len(asked) > 1 else 'has'} no effect while "
            f'optimizer.name = "{optimizer.name}". Set optimizer.name = "Muon", or leave '
            f"{'them' if len(asked) > 1 else 'it'} out."
        )
    if optimizer.name == "Muon" and optimizer.adamw_lr is not None and not optimizer.lr:
        yield (
            f"optimizer.adamw_lr = {optimizer.adamw_lr:g} follows the schedule of optimizer.lr, "
            "which is 0. Set lr above 0, or leave adamw_lr out."
        )


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


def _anomalies(config: Config) -> Iterator[str]:
    anomalies = config.anomalies
    asked = [
        f'anomalies.{key} = "roll_back"'
        for key in ("on_non_finite", "on_spike")
        if getattr(anomalies, key) == "roll_back"
    ]
    if asked and (not config.checkpoint.enable or config.checkpoint.load_only):
        yield (
            f"{' and '.join(asked)} needs states to return to, and this run saves none. Set "
            'checkpoint.enable = true and load_only = false, or choose "skip" or "stop".'
        )
    replicas = config.fault_tolerance
    if replicas.keep_gradients == "on" and not replicas.can_keep_gradients:
        yield (
            'fault_tolerance.keep_gradients = "on" needs world_size_mode = "constant_batch", '
            "replay_check = false and no semi_sync_method: leave it out, or change these."
        )
    if config.fault_tolerance.replay_check and config.compile.enable:
        yield (
            "fault_tolerance.replay_check = true cannot see the gradients of compiled blocks. Set "
            "compile.enable = false, or switch it off."
        )
    if anomalies.spike_min_steps > anomalies.spike_window:
        yield (
            f"anomalies.spike_min_steps ({anomalies.spike_min_steps}) is above spike_window "
            f"({anomalies.spike_window}), so that nothing would ever be a spike. Set it to at most "
            f"{anomalies.spike_window}."
        )


def _replicas(config: Config) -> Iterator[str]:
    section, path = config.fault_tolerance, config.parallelism.pipeline_parallel_schedule_csv
    if section.enable:
        grpc = ("grpc", "google.protobuf") if section.lighthouse == "torchft" else ()
        packages = ("torchft", *grpc)
        errors = (missing(package, "fault_tolerance.enable = true") for package in packages)
        yield from (error for error in errors if error is not None)
        # The launcher makes one for its replicas if there is none.
        token = os.environ.get(TOKEN)
        if token is not None and (problem := secret_problem(token)):
            yield f"fault_tolerance.enable = true: {problem}"
    if section.enable and path and section.world_size_mode != "dynamic":
        yield (
            f'parallelism.pipeline_parallel_schedule_csv = "{path}" is for one number of '
            "microbatches, and replicas that share a step have more of them after one has left "
            f'(fault_tolerance.world_size_mode = "{section.world_size_mode}"). Choose a '
            'pipeline_parallel_schedule by name, or world_size_mode = "dynamic".'
        )
    if section.enable and section.join_timeout_s >= section.quorum_timeout_s:
        yield (
            f"fault_tolerance.join_timeout_s ({section.join_timeout_s:g}) is not below "
            f"quorum_timeout_s ({section.quorum_timeout_s:g}), after which a replica ends, so that "
            f"it would never train without one that is lost. Raise quorum_timeout_s, or lower "
            f"join_timeout_s."
        )


def semi_sync_problems(config: Config) -> Iterator[str]:
    """Yield the problems of `fault_tolerance.semi_sync_method`."""
    section = config.fault_tolerance
    method = section.semi_sync_method
    asked = f"fault_tolerance.semi_sync_method = {toml_literal(method)}"
    if method != "streaming_diloco":
        yield from _only_streaming(config)
    if method is None:
        return
    if not section.enable:
        yield f"{asked} averages replicas. Set fault_tolerance.enable = true."
    if section.world_size_mode == "fixed_with_spares":
        yield (f'{asked} has no spares. Set world_size_mode = "constant_batch" or "dynamic".')
    if config.model.router_bias_update_rate:
        yield (
            f"{asked} does not average the biases of routers. Set "
            "model.router_bias_update_rate = 0."
        )
    # Each replica judges its own loss, and none may go back alone.
    anomalies = {"on_non_finite": "skip", "on_spike": "off"}
    for key, needed in anomalies.items():
        if (reaction := getattr(config.anomalies, key)) == "roll_back":
            yield (
                f'anomalies.{key} = "{reaction}" is incompatible with {asked}. Set it to '
                f'"{needed}".'
            )
    # The first stage of a warm-up has the smallest batch.
    key, batch = "training.global_batch_size", config.training.global_batch_size
    for _, size in config.training.batch_size_warmup[:1]:
        key, batch = "training.batch_size_warmup[0][1]", size
    rounds = batch // config.training.local_batch_size
    shares = section.world_size_mode == "constant_batch" and batch > 0
    if shares and section.group_size > rounds:
        yield (
            f"{asked} gives each replica some of every step, and {key} ({batch}) has "
            f"{rounds} rounds of local_batch_size for fault_tolerance.group_size = "
            f'{section.group_size} replicas. Raise it, or set world_size_mode = "dynamic".'
        )
    # Averaging changes the state between two updates.
    for key in ("replay_check", "state_check"):
        if getattr(section, key):
            yield f"fault_tolerance.{key} is incompatible with {asked}. Set it to false."
    if section.should_quantize and not on_gpu(config):
        yield "fault_tolerance.should_quantize = true needs a GPU. Set it to false."
    fragments = section.num_fragments if method == "streaming_diloco" else 1
    every, rest = divmod(section.sync_steps, fragments)
    if rest:
        yield (
            f"fault_tolerance.sync_steps ({section.sync_steps}) is not a multiple of num_fragments "
            f"({fragments}). Set it to {section.sync_steps - rest + fragments}."
        )
        return
    if section.fragment_sync_delay >= every:
        yield (
            f"fault_tolerance.fragment_sync_delay ({section.fragment_sync_delay}) must be below "
            f"the {every} steps from one fragment to the next (sync_steps / num_fragments)."
        )
    # At other steps each replica has weights of its own.
    lengths = {"training.steps": (config.training.steps, section.sync_steps)}
    if config.checkpoint.enable:
        lengths["checkpoint.interval"] = (config.checkpoint.interval, every)
    for key, (length, unit) in lengths.items():
        if length % unit:
            yield (
                f"{key} ({length}) is not a multiple of {unit}, the steps between averages "
                f"({asked}). Set it to {length - length % unit + unit}."
            )


def _only_streaming(config: Config) -> Iterator[str]:
    section = config.fault_tolerance
    keys = {"num_fragments": 1, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0}
    for key, off in keys.items():
        if (setting := getattr(section, key)) != off:
            # torchtitan runs DiLoCo with several fragments as Streaming DiLoCo.
            streaming = (
                'Set semi_sync_method = "streaming_diloco", which torchtitan means by "diloco" '
                f"with fragments, or {key} = {toml_literal(off)}."
            )
            remedy = streaming if section.semi_sync_method == "diloco" else ""
            yield (
                f"fault_tolerance.{key} = {toml_literal(setting)} has no effect without "
                f'semi_sync_method = "streaming_diloco". '
                f"{remedy or f'Set it to {toml_literal(off)}.'}"
            )
