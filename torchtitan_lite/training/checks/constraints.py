"""Constraints between sections, with the number of processes, and with the machine.

All checks run and every problem is reported at once, with its values and what to change. Checks of
degrees of parallelism are in `mesh_constraints`.
"""

import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import torch

from torchtitan_lite.checkpoint.convert.hugging_face import HuggingFaceFolder, is_hugging_face
from torchtitan_lite.checkpoint.convert.hugging_face.to_peft import module_name
from torchtitan_lite.checkpoint.storage import open_parent_storage
from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.data import TEXT_DATASETS, CorpusConfig, DataConfig
from torchtitan_lite.config.tables.section import toml_literal
from torchtitan_lite.config.tables.training import CROSS_ENTROPY
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import CheckpointError, ConfigError, MeshError
from torchtitan_lite.core.optional_dependencies import missing
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.core.urls import is_url, local_path
from torchtitan_lite.distributed.mesh import ParallelDims, resolve_degrees
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.models import check_family
from torchtitan_lite.nn.lora import adapted_layers
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.optim.optimizer import name_problem
from torchtitan_lite.parallel.float8 import unsupported_reason
from torchtitan_lite.training.checks.mesh_constraints import (
    mesh_problems,
    on_gpu,
    pipeline_problems,
    sequence_lengths,
)
from torchtitan_lite.training.checks.trained_model import trained_spec


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
        problems += _export(config, spec)
    problems += _loss(config, spec, degrees)
    problems += _optimizer(config)
    problems += _compiled(config)
    problems += _traced_step(config)
    problems += _float8(config)
    problems += _lora(config, spec)
    problems += _device(config)
    problems += _conversations(config)
    problems += _shuffled_streams(config)
    problems += _validation(config)
    problems += _samples(config)
    problems += _checkpoint(config)
    problems += _anomalies(config)
    problems += _files(config)
    problems += _initial_format(config)
    problems += _folders(config)
    problems += _replicas(config)
    problems += _publish(config)
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
    except (CheckpointError, OSError):
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


def _training_corpora(config: Config) -> dict[str, DataConfig | CorpusConfig]:
    """Return the sections that name the training data, by their names in a file."""
    sections: dict[str, DataConfig | CorpusConfig] = {"training": config.training}
    for index, corpus in enumerate(config.training.corpora):
        sections[f"training.corpora[{index}]"] = corpus
    return sections


def _shuffled_streams(config: Config) -> Iterator[str]:
    for name, section in _training_corpora(config).items():
        if section.shuffle_window and not section.streaming:
            yield (
                f"{name}.shuffle_window = {section.shuffle_window} is for streams, and other "
                f"corpora are shuffled as a whole. Set {name}.streaming = true, or omit it."
            )


def _conversations(config: Config) -> Iterator[str]:
    sections: dict[str, DataConfig | CorpusConfig | ValidationConfig] = {
        **_training_corpora(config),
        "validation": config.validation,
    }
    for name, section in sections.items():
        column = section.messages_column
        if column is None:
            continue
        asked = f'{name}.messages_column = "{column}"'
        if section.dataset_path is None and section.dataset in (None, *TEXT_DATASETS):
            text_note = (
                "" if section.dataset is None else f', and dataset = "{section.dataset}" is text'
            )
            yield (
                f"{asked} needs conversations{text_note}. Set {name}.dataset_path to a file of "
                f"them, or {name}.dataset to a chat data set on the hub."
            )
        if section.text_column != "text":
            yield (
                f'{asked} and {name}.text_column = "{section.text_column}": a corpus holds either '
                "conversations or texts. Leave one of them out."
            )
        if not isinstance(section, ValidationConfig) and section.streaming:
            yield (
                f"{asked} and {name}.streaming = true: conversations are tokenized before the "
                "first step, so that every problem in them is reported at once. Set "
                "streaming = false."
            )


def _validation(config: Config) -> Iterator[str]:
    validation = config.validation
    if validation.enable and validation.corpus() is None and not config.training.held_out_fraction:
        yield (
            "validation.enable = true, but there is nothing to validate on: validation.dataset and "
            "validation.dataset_path are unset and training.held_out_fraction is 0. Set one of "
            "them (held_out_fraction = 0.01 keeps 1 % of the documents out of training)."
        )
    if not validation.enable or validation.corpus() is not None:
        return
    for name, section in _training_corpora(config).items():
        is_online = section.dataset in REGISTRY.online_datasets
        if section.streaming or is_online:
            online = f'{name}.dataset = "{section.dataset}" is an online data set'
            yield (
                f"{online if is_online else f'{name}.streaming = true'}, and its held-out "
                "documents are not known in advance, so they cannot be used for validation. Set "
                "validation.dataset or validation.dataset_path, or validation.enable = false."
            )


def _samples(config: Config) -> Iterator[str]:
    samples = config.validation.samples
    if samples and not config.validation.enable:
        yield (
            f"validation.samples = {samples} has no effect while validation.enable is false. Set "
            "validation.enable = true, or samples = 0."
        )
    if samples and config.training.enable_cpu_offload and on_gpu(config):
        yield (
            f"validation.samples = {samples} needs the weights on the GPU, and "
            "training.enable_cpu_offload = true keeps them off it. Set either to its default."
        )


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.last_save_in_hf and (not checkpoint.enable or checkpoint.load_only):
        yield (
            "checkpoint.last_save_in_hf = true exports the last checkpoint, and none is saved. Set "
            "checkpoint.enable = true and checkpoint.load_only = false."
        )
    yield from _buddies(config)
    if checkpoint.enable or checkpoint.load_only:
        return
    asked = []
    if checkpoint.load_step >= 0:
        asked.append(f"checkpoint.load_step = {checkpoint.load_step}")
    if checkpoint.initial_load_path is not None and not config.model.uses_lora:
        asked.append(f'checkpoint.initial_load_path = "{checkpoint.initial_load_path}"')
    if asked:
        yield (
            f"{' and '.join(asked)} {'have' if len(asked) > 1 else 'has'} no effect while "
            "checkpoint.enable is false. Set checkpoint.enable = true, or checkpoint.load_only = "
            "true to save nothing."
        )


def _buddies(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    asked = f"checkpoint.buddy_interval = {checkpoint.buddy_interval}"
    if checkpoint.buddy_interval == 0:
        return
    if not checkpoint.enable or checkpoint.load_only or checkpoint.async_mode == "disabled":
        yield (
            f"{asked} copies snapshots, and this run takes none. Set checkpoint.enable = true, "
            'load_only = false and async_mode = "async", or buddy_interval = 0.'
        )
    if config.fault_tolerance.enable:
        yield (
            f"{asked} and fault_tolerance.enable = true: the other replicas already hold the state "
            "of a lost machine. Set buddy_interval = 0."
        )


def _export(config: Config, spec: ModelSpec) -> Iterator[str]:
    if config.checkpoint.last_save_in_hf and spec.hugging_face is None:
        yield (
            f"checkpoint.last_save_in_hf = true, but {spec.name} {spec.flavor} is not a model of "
            "transformers. Set it to false."
        )
    if config.checkpoint.last_save_in_hf and spec.hugging_face is not None:
        try:
            for layer in adapted_layers(spec):
                module_name(spec.hugging_face.keys, layer)
        except CheckpointError as error:
            yield f"checkpoint.last_save_in_hf = true, but {error}"
    moe = getattr(spec.dims, "moe", None)
    keys = () if spec.hugging_face is None else spec.hugging_face.keys
    has_place = all(key.forms for key in keys if key.name.endswith("router.expert_bias_X"))
    is_saved = config.checkpoint.last_save_in_hf and not has_place
    if is_saved and moe is not None and moe.bias_update_rate:
        yield (
            "checkpoint.last_save_in_hf = true, but the bias that balances the experts "
            f"(model.router_bias_update_rate = {moe.bias_update_rate}) has no place in a Hugging "
            "Face folder. Set one of them to false or 0; or export afterwards by "
            "torchtitan-lite convert to-hf --drop-expert-bias."
        )


def _publish(config: Config) -> list[str]:
    publish = config.publish
    if not publish.enable:
        return []
    if not Path("/dev/shm").is_dir():
        return ["publish.enable needs shared memory in /dev/shm, which this machine does not have."]
    if "lora" in config.model.converters:
        return [
            'publish.enable with "lora" in model.converters: subscribers would receive frozen '
            "weights and adapters apart. Disable one of them."
        ]
    problems: list[str] = []
    timeout_s = config.comm.train_timeout_seconds
    if publish.when_in_use == "wait" and publish.max_wait_s >= timeout_s:
        problems.append(
            f"publish.max_wait_s = {publish.max_wait_s}: while a rank waits for subscribers, the "
            f"others wait for it, at most comm.train_timeout_seconds = {timeout_s}. Set it to less."
        )
    if publish.address is not None and (problem := secret_problem(os.environ.get(TOKEN, ""))):
        problems.append(f"publish.address = {publish.address!r}: {problem}")
    if publish.deltas and publish.address is None:
        problems.append(
            "publish.deltas = true has no effect without publish.address: subscribers on this "
            "machine read shared memory. Give an address, or disable it."
        )
    return problems


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
        packages = ("torchft", "grpc", "google.protobuf")
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


def _initial_format(config: Config) -> Iterator[str]:
    path = config.checkpoint.initial_load_path
    if path is None or not config.checkpoint.initial_load_in_hf:
        return
    try:
        is_expected = is_hugging_face(*open_parent_storage(path))
    except (CheckpointError, ConfigError, OSError):
        # Reported where it is loaded, which a run that resumes does not do.
        return
    if not is_expected:
        yield (
            f'checkpoint.initial_load_in_hf = true, but initial_load_path = "{path}" is not a '
            "Hugging Face folder. Leave initial_load_in_hf out: the format is detected."
        )


def _folders(config: Config) -> Iterator[str]:
    is_remote = {}
    for key, location in (
        ("checkpoint.folder", config.checkpoint.folder),
        ("job.dump_folder", config.job.dump_folder),
    ):
        try:
            is_remote[key] = is_url(location)
        except ConfigError as error:
            yield f"{key}: {error}"
    if "job.dump_folder" not in is_remote:
        return
    if is_remote["job.dump_folder"]:
        yield (
            f'job.dump_folder = "{config.job.dump_folder}" is a URL, and logs and metrics are '
            "written to a folder. Set it to a path; checkpoint.folder may be a URL."
        )
        return
    folder = Path(config.job.dump_folder).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    asked = f'job.dump_folder = "{config.job.dump_folder}" cannot be written'
    if not there.is_dir():
        yield f"{asked}: {there} is not a folder. Choose another one."
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{asked}: {there} is not writable. Change its mode, or choose another."


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
        if path is None:
            continue
        try:
            named = local_path(path)
        except ConfigError as error:
            yield f"{key}: {error}"
            continue
        if named is None:
            # A URL is looked up by fsspec when it is read.
            continue
        named = named.expanduser()
        # An existing name may have brackets, which mean something else in a glob.
        if named.exists() or glob(str(named), recursive=True):
            continue
        relative = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
        yield f'{key} = "{path}": does not exist{relative}.'


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
