"""`torchtitan-lite convert`: from and to Hugging Face folders and torch DCP."""

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

from torchtitan_lite.checkpoint import (
    WAYS,
    StoredSnapshot,
    adapted_layers,
    newest_step,
    open_merged,
    reject_external,
    to_record,
)
from torchtitan_lite.checkpoint.convert.dcp import DcpFolder, convert_from_dcp, convert_to_dcp
from torchtitan_lite.checkpoint.convert.hugging_face import (
    BLOCK_BYTES,
    CONFIG,
    AdapterExport,
    FolderExport,
    HuggingFaceExport,
    HuggingFaceFolder,
    HuggingFaceImport,
    HuggingFaceSnapshot,
    check_disk_space,
    is_hugging_face,
)
from torchtitan_lite.checkpoint.storage import (
    MANIFEST,
    exists,
    open_parent_storage,
    open_storage,
)
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import INTERRUPTED, CheckpointError, DataError, UserError
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.core.urls import local_path
from torchtitan_lite.data.tokenizer import special_ids
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.models import folder_problem, hugging_face_model, model_spec
from torchtitan_lite.optim import WarmupStableDecay, build_lr_scheduler, build_optimizer
from torchtitan_lite.serving.inference.weights import Weights, config_of_snapshot, find_tokenizer
from torchtitan_lite.training.run_config import parse_command_line

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def from_hugging_face(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Convert a Hugging Face folder to a checkpoint. Returns the exit status."""
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
    if ignored := conversion.source.ignored:
        logger.info("%d tensors were not imported, such as %s.", len(ignored), ignored[0])
    print(f"{conversion.where}: {len(conversion.source.tensors)} tensors, weights only.")
    return 0


def _prepare(options: argparse.Namespace) -> HuggingFaceImport:
    storage, name = open_parent_storage(str(options.hf_dir))
    if not is_hugging_face(storage, name):
        raise CheckpointError(
            folder_problem(options.hf_dir)
            or f"{options.hf_dir} is not a Hugging Face folder: it has neither model.safetensors "
            "nor model.safetensors.index.json."
        )
    folder = HuggingFaceFolder(storage, name)
    # Raises DataError for a damaged tokenizer, before anything is written.
    special_ids(options.hf_dir)
    # Assets are read from a local folder, so they cannot be in an object store.
    folder_here = local_path(options.out_dir)
    assets = None if folder_here is None else folder_here.expanduser().absolute() / "assets"
    config_file = f"{folder.where}/{CONFIG}"
    model = hugging_face_model(folder.config, str(assets or options.hf_dir), config_file)
    if options.mtp_depth:
        model = model.model_copy(update={"mtp_depth": options.mtp_depth})
    return HuggingFaceImport(
        source=HuggingFaceSnapshot(folder, model_spec(model), block_bytes=BLOCK_BYTES),
        storage=open_storage(options.out_dir),
        dtype=_dtype(options),
        run_config=to_record(Config(model=model)),
        assets=assets,
    )


def to_hugging_face(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Convert a checkpoint to a Hugging Face folder. Returns the exit status."""
    configure_logging()
    try:
        source, config = _open_step(options.checkpoint, ema=options.ema)
        conversion = _export(source, config, options)
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


def _export(source: StoredSnapshot, config: Config, options: argparse.Namespace) -> FolderExport:
    """Prepare the export of all weights, of adapters alone, or of both merged."""
    has_adapters = bool(adapted_layers(source))
    asked = " and ".join(
        name for name, value in (("--merge", options.merge), ("--base", options.base)) if value
    )
    if asked and not has_adapters:
        raise CheckpointError(
            f"{asked}: {source.where} holds no adapters, but all weights. Leave it out."
        )
    if options.base and not options.merge:
        raise CheckpointError(
            "--base is where the weights are that --merge adds adapters to. Give both."
        )
    spec = model_spec(config.model)
    weights = Weights(snapshot=source, spec=spec, config=config)
    assets = options.assets or _tokenizer_folder(weights)
    if has_adapters and not options.merge:
        return AdapterExport(
            source, options.out_dir, spec, config.lora, dtype=_dtype(options), assets=assets
        )
    whole = open_merged(source, spec, options.base) if has_adapters else source
    return HuggingFaceExport(
        whole,
        options.out_dir,
        spec,
        dtype=_dtype(options),
        max_shard_bytes=options.max_shard_size,
        assets=assets,
        special_ids=special_ids(assets),
        drop_expert_bias=options.drop_expert_bias,
    )


def _tokenizer_folder(weights: Weights) -> Path | None:
    """Return the folder of the tokenizer with which the weights were trained, if it is
    accessible."""
    folder = weights.config.model.hf_assets_path
    if folder is not None and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser()
    try:
        return find_tokenizer(weights, None).folder
    except DataError as error:
        logger.warning("%s", error)
        return None


def from_dcp(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Convert a torch DCP checkpoint, of the model configured in `arguments`, to a checkpoint.
    Returns the exit status."""
    configure_logging()
    try:
        config, _ = parse_command_line(arguments)
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
            f"Not converted: {', '.join(done.skipped)}. Learning rate and optimizer follow the "
            "configuration, and the data starts from its beginning."
        )
    return 0


def to_dcp(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Convert a checkpoint to torch DCP with torchtitan's names. Returns the exit status."""
    configure_logging()
    try:
        source, config = _open_step(options.checkpoint, needs_flavor=True)
        if adapted_layers(source):
            raise CheckpointError(
                f"{source.where} holds adapters alone, for which torchtitan's checkpoints have no "
                "names here. Export them: torchtitan-lite convert to-hf."
            )
        num_tensors = convert_to_dcp(
            source,
            options.out_dir,
            model_spec(config.model),
            release=options.torchtitan,
            param_group=_param_group(source, config),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    print(
        f"{options.out_dir}: {num_tensors} tensors, as torchtitan {options.torchtitan} names them."
    )
    return 0


def _open_step(
    path: str, *, needs_flavor: bool = False, ema: bool = False
) -> tuple[StoredSnapshot, Config]:
    """Open the newest checkpoint that `path` names, with the configuration that it records; with
    `ema`, the moving average of its weights. Raises as `config_of_snapshot`."""
    storage, name = open_parent_storage(newest_step(path))
    reject_external(storage, name)
    if not exists(storage, f"{name}/{MANIFEST}"):
        raise CheckpointError(f"{path} contains no checkpoint. Give {WAYS}.")
    source = StoredSnapshot(storage, name, ema=ema)
    return source, config_of_snapshot(source, needs_flavor=needs_flavor)


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return _DTYPES[options.dtype] if options.dtype else None


def _run_with_bar(num_bytes: int, run: Callable[[Callable[[int], None]], Any]) -> Any:
    """Run a conversion, which reports the bytes it has written. An interrupt ends the program
    with a message that explains how to resume."""
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
    """Handle SIGTERM, which batch systems send to end jobs, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _param_group(source: StoredSnapshot, config: Config) -> dict[str, Any]:
    """Return the parameter group of torch's optimizer, with the learning rate of the next step.
    torchtitan has one weight decay for all parameters. Raises CheckpointError for the state of a
    run with Muon, which includes that of AdamW: torchtitan has one optimizer for all parameters."""
    if config.optimizer.name == "Muon":
        if source.saved.model_only:
            return {}
        raise CheckpointError(
            'The checkpoint has the state of optimizer.name = "Muon", for which torchtitan has no '
            "form. Convert the weights alone: torchtitan-lite convert to-hf."
        )
    optimizer = build_optimizer(
        config.optimizer, nn.Linear(1, 1, bias=False), (), detect_device("cpu")
    )
    (inner,) = optimizer.inner
    (group,) = inner.param_groups
    saved = source.saved.values.get("lr_scheduler")
    schedule = (
        WarmupStableDecay(**saved)
        if saved
        else build_lr_scheduler(config.lr_scheduler, config.optimizer, config.training.steps)
    )
    settings = {option: value for option, value in group.items() if option != "params"}
    lr = schedule.lr(source.saved.step)
    return settings | {"lr": lr, "initial_lr": schedule.peak_lr}
