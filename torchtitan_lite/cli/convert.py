"""`torchtitan-lite convert`: from and to Hugging Face folders and torch DCP. Layer: below cli."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import nn

from torchtitan_lite.checkpoint import StoredSnapshot, reject_external
from torchtitan_lite.checkpoint.hugging_face import (
    BLOCK_BYTES,
    HuggingFaceExport,
    HuggingFaceImport,
    HuggingFaceSnapshot,
    check_disk_space,
    is_hugging_face,
    read_config,
)
from torchtitan_lite.checkpoint.interchange import DcpFolder, convert_from_dcp, convert_to_dcp
from torchtitan_lite.checkpoint.storage import open_parent_storage, open_storage
from torchtitan_lite.cli.parsers import local_path
from torchtitan_lite.config import Config, parse_command_line, to_record
from torchtitan_lite.data.tokenizer import special_ids
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import INTERRUPTED, CheckpointError, DataError, UserError
from torchtitan_lite.inference.weights import Weights, find_tokenizer, run_config
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import hugging_face_model, model_spec
from torchtitan_lite.optim import WarmupStableDecay, build_lr_scheduler, build_optimizer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def from_hugging_face(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a checkpoint from a Hugging Face folder. Returns the exit status."""
    configure_logging()
    try:
        conversion = _prepare(options)
        if conversion.assets is not None:
            check_disk_space(conversion.assets, conversion.num_bytes_left)
        _run_with_bar(
            conversion.num_bytes,
            lambda written: conversion.run(num_workers=options.workers, written=written),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    print(f"{conversion.where}: {len(conversion.source.tensors)} tensors, weights only.")
    return 0


def _prepare(options: argparse.Namespace) -> HuggingFaceImport:
    folder = options.hf_dir
    storage, name = open_parent_storage(str(folder))
    if not is_hugging_face(storage, name):
        raise CheckpointError(
            f"{folder} is not a Hugging Face folder: it has neither model.safetensors nor "
            "model.safetensors.index.json."
        )
    # An object store has no place for what is read from a folder.
    assets = None if "://" in options.out_dir else local_path(options.out_dir) / "assets"
    model = hugging_face_model(read_config(storage, name), str(assets or folder))
    return HuggingFaceImport(
        source=HuggingFaceSnapshot(storage, name, model_spec(model), block_bytes=BLOCK_BYTES),
        storage=open_storage(options.out_dir),
        dtype=_dtype(options),
        run_config=to_record(Config(model=model)),
        assets=assets,
    )


def to_hugging_face(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a Hugging Face folder from a checkpoint. Returns the exit status."""
    configure_logging()
    try:
        source, config = _open_step(options.checkpoint)
        spec = model_spec(config.model)
        weights = Weights(snapshot=source, spec=spec, config=config)
        assets = options.assets or _tokenizer_folder(weights)
        conversion = HuggingFaceExport(
            source,
            options.out_dir,
            spec,
            dtype=_dtype(options),
            max_shard_bytes=options.max_shard_size,
            assets=assets,
            special_ids=special_ids(assets),
            drop_expert_bias=options.drop_expert_bias,
        )
        check_disk_space(options.out_dir, conversion.num_bytes_left)
        copied = _run_with_bar(
            conversion.num_bytes,
            lambda written: conversion.run(num_workers=options.workers, written=written),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    if "tokenizer.json" not in copied and "tokenizer.model" not in copied:
        logger.warning(
            "There is no tokenizer in %s. Add its files, or export again with --assets DIR.",
            options.out_dir,
        )
    print(f"{options.out_dir}: {conversion.num_bytes / 1e6:.1f} MB of weights.")
    return 0


def _tokenizer_folder(weights: Weights) -> Path | None:
    """The folder of the tokenizer that the weights were trained with, where it is in reach."""
    given = weights.config.model.hf_assets_path
    if given is not None and Path(given).expanduser().is_dir():
        return Path(given).expanduser()
    try:
        return find_tokenizer(weights, None).folder
    except DataError as error:
        logger.warning("%s", error)
        return None


def from_dcp(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a checkpoint from a torch DCP checkpoint, of the model that the configuration in
    `others` names. Returns the exit status."""
    configure_logging()
    try:
        config, _ = parse_command_line(others)
        done = convert_from_dcp(
            DcpFolder(options.dcp_dir),
            open_storage(options.out_dir),
            model_spec(config.model),
            run_config=to_record(config),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    kind = "weights only" if done.model_only else f"step {done.step}"
    print(f"{done.where}: {done.num_tensors} tensors, {kind}.")
    if done.skipped:
        print(
            f"Not taken over: {', '.join(done.skipped)}. Learning rate and optimizer follow the "
            "configuration, and the data begins anew."
        )
    return 0


def to_dcp(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a torch DCP checkpoint with torchtitan's names. Returns the exit status."""
    configure_logging()
    try:
        source, config = _open_step(options.checkpoint, needs_flavor=True)
        number = convert_to_dcp(
            source,
            options.out_dir,
            model_spec(config.model),
            release=options.torchtitan,
            param_group=_param_group(source, config),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    print(f"{options.out_dir}: {number} tensors, as torchtitan {options.torchtitan} names them.")
    return 0


def _open_step(path: str, *, needs_flavor: bool = False) -> tuple[StoredSnapshot, Config]:
    """The checkpoint of a step, and the configuration that it records. Raises as `run_config`."""
    storage, name = open_parent_storage(path)
    reject_external(storage, name)
    source = StoredSnapshot(storage, name)
    return source, run_config(source, needs_flavor=needs_flavor)


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return _DTYPES[options.dtype] if options.dtype else None


def _run_with_bar(num_bytes: int, run: Callable[[Callable[[int], None]], Any]) -> Any:
    """Run a conversion, which reports the bytes it has written. An interrupt ends the program and
    says how to continue."""
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with _sigterm_interrupts(), Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("writing", total=num_bytes)
        try:
            return run(lambda count: bar.advance(task, count))
        except KeyboardInterrupt:
            print("Interrupted. The same command continues from here.", file=sys.stderr)
            sys.exit(INTERRUPTED)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM, with which batch systems end jobs, as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _param_group(source: StoredSnapshot, config: Config) -> dict[str, Any]:
    """What torch's optimizer keeps of every parameter, with the learning rate of the next step.
    torchtitan has one weight decay for all."""
    optimizer = build_optimizer(
        config.optimizer, nn.Linear(1, 1, bias=False), (), detect_device("cpu")
    )
    (group,) = optimizer.inner.param_groups
    saved = source.saved.values.get("lr_scheduler")
    schedule = (
        WarmupStableDecay(**saved)
        if saved
        else build_lr_scheduler(config.lr_scheduler, config.optimizer, config.training.steps)
    )
    settings = {option: value for option, value in group.items() if option != "params"}
    lr = schedule.lr(source.saved.step)
    return settings | {"lr": lr, "initial_lr": schedule.peak_lr}
