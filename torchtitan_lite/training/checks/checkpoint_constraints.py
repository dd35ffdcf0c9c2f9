"""Checks of what a run loads, saves, exports and publishes."""

import os
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.checkpoint.convert.hugging_face import is_hugging_face, peft_module_name
from torchtitan_lite.checkpoint.storage import open_parent_storage
from torchtitan_lite.config.schema import Config
from torchtitan_lite.core.errors import CheckpointError, ConfigError
from torchtitan_lite.core.urls import is_url
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.nn.lora import layers_with_adapters
from torchtitan_lite.nn.spec import ModelSpec


def checkpoint_problems(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    """Yield what is wrong with checkpoints, exports and published weights. `spec` is the trained
    model, if it is known. Reads the file system."""
    if spec is not None:
        yield from _export(config, spec)
    yield from _checkpoint(config)
    yield from _initial_format(config)
    yield from _folders(config)
    yield from _publish(config)


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
            f"checkpoint.last_save_in_hf = true, but {spec.unknown_to_transformers}. Set it to "
            "false."
        )
    exports_adapters = config.checkpoint.last_save_in_hf and config.model.uses_lora
    if exports_adapters and spec.hugging_face is not None:
        try:
            for layer in layers_with_adapters(spec):
                peft_module_name(spec.hugging_face.keys, layer)
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
