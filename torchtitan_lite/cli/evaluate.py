"""`torchtitan-lite evaluate`."""

import argparse
import json
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint import load, model_tensors
from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.core.log import configure_logging, log_error_on_rank_0
from torchtitan_lite.data import open_validation
from torchtitan_lite.data.tokenizer import TokenizerFiles
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, resolve_degrees, start_mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.serving.inference import Weights, open_weights, tokenizer_of
from torchtitan_lite.training.builders import build_model, spec_on_device
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import config_from
from torchtitan_lite.training.validation import HeldOutLoss, validate

_KEYS = {
    "dataset": ("validation.dataset",),
    "dataset_path": ("validation.dataset_path",),
    "dataset_config": ("validation.dataset_config",),
    "dataset_split": ("validation.dataset_split",),
    "text_column": ("validation.text_column",),
    "seq_len": ("validation.seq_len", "training.seq_len"),
    "batch_size": ("validation.local_batch_size",),
    "steps": ("validation.steps",),
    "dtype": ("training.dtype", "training.mixed_precision_param"),
    "device": ("job.device",),
}
"""Option -> the keys that it sets."""
_DATA = ("dataset", "dataset_path")
_OF_TRAINING = ("dtype", "mixed_precision_param", "cache_folder", "seq_len")
"""Keys of the run's [training] that apply to any data."""


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Evaluate according to `options`; `arguments` are overrides. Returns the exit status."""
    configure_logging()
    try:
        with start_mesh(device=detect_device(options.device)) as mesh:
            record = evaluate(options, arguments, mesh)
            if mesh.is_leader:
                _print(record, options.json)
    except (UserError, OSError) as error:
        log_error_on_rank_0(error)
        return 1
    return 0


def evaluate(options: argparse.Namespace, arguments: Sequence[str], world: Mesh) -> dict[str, Any]:
    """Compute loss, perplexity and speed, on every rank; `arguments` are overrides as for `train`.
    Every rank must call it."""
    weights = open_weights(options.checkpoint, world, ema=options.ema)
    config = _config(weights, options, arguments)
    check_against(config, world.world_size)
    mesh = world.with_degrees(resolve_degrees(config.parallelism, world.world_size))
    tokenizer = tokenizer_of(weights, options.tokenizer)
    seq_len = config.validation.seq_len or config.training.seq_len
    stride = options.stride
    if stride is None and _names_data(options, arguments):
        stride = seq_len
    if stride is not None and stride > seq_len:
        raise ConfigError(
            f"--stride {stride} skips tokens: a window has {seq_len}. Set it to at most "
            f"{seq_len}, or raise --seq-len."
        )
    loss, seconds = _measured(weights, config, tokenizer, mesh, stride)
    corpus = config.validation.corpus()
    return {
        "checkpoint": weights.snapshot.where,
        "data": "held-out documents" if corpus is None else corpus.dataset_path or corpus.dataset,
        "seq_len": seq_len,
        "stride": stride,
        "dtype": config.training.dtype,
        "processes": mesh.world_size,
        "loss": loss.mean,
        "perplexity": perplexity(loss.mean),
        "tokens": loss.num_targets,
        "tokens_per_second": loss.num_targets / seconds,
    }


def _measured(
    weights: Weights, config: Config, tokenizer: TokenizerFiles, mesh: Mesh, stride: int | None
) -> tuple[HeldOutLoss, float]:
    """Return the loss, and the seconds it took after the model was loaded. Every rank must call
    it."""
    spec = spec_on_device(config, mesh.device)
    data = run_on_all_ranks(
        lambda: open_validation(
            config.training,
            config.validation,
            tokenizer,
            vocab_size=spec.vocab_size,
            seed=config.debug.seed or 0,
            document_mask=spec.document_mask,
            pin_memory=mesh.device.pin_memory,
            stride=stride,
        )
    )
    (model,) = build_model(config, spec, mesh, init_weights=False)
    load(weights.snapshot, model_tensors(model), {"model"}, mesh)
    schedule = build_pipeline_schedule(
        [model],
        spec,
        cross_entropy(logits_per_chunk=mesh.device.logits_per_chunk),
        mesh,
        config.parallelism,
        hidden_dtype=precision_policy(config.training, mesh.device).compute,
    )
    begin = time.perf_counter()
    loss = validate(model, schedule, data, mesh)
    return loss, time.perf_counter() - begin


def _config(weights: Weights, options: argparse.Namespace, arguments: Sequence[str]) -> Config:
    """Return the configuration: the command line, over the model and precision recorded with the
    weights, and over the recorded data unless the command line names a data set."""
    run = weights.config
    overrides = [
        f"--{key}={getattr(options, option)}"
        for option, keys in _KEYS.items()
        if getattr(options, option) is not None
        for key in keys
    ]
    tables = {
        "model": run.model.model_dump(),
        "training": _part_of(run.training.model_dump(), _OF_TRAINING),
        "validation": {"enable": True},
        "debug": {"seed": run.debug.seed},
    }
    if not _names_data(options, arguments):
        batch = {"local_batch_size", "global_batch_size", "batch_size_warmup"}
        data_keys = DataConfig.model_fields.keys() - batch
        tables["training"] |= _part_of(run.training.model_dump(), data_keys)
        changes = {"enable": True, "samples": 0, "steps": -1}
        tables["validation"] = run.validation.model_dump() | changes
        if run.validation.corpus() is None and not run.training.held_out_fraction:
            raise ConfigError(
                f"{weights.snapshot.where} is of a run without validation data, and none are "
                "given. Give --dataset NAME or --dataset-path FILES."
            )
    config = config_from(tables, weights.snapshot.where, [*overrides, *arguments])
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree}:"
            " a model is evaluated without a pipeline. Use data_parallel_shard_degree or "
            "tensor_parallel_degree."
        )
    return config


def _names_data(options: argparse.Namespace, arguments: Sequence[str]) -> bool:
    """Whether the command line names a data set."""
    return any(getattr(options, key) is not None for key in _DATA) or any(
        f"validation.{key}" in argument for key in _DATA for argument in arguments
    )


def _part_of(section: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key in keys}


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinite if it exceeds the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _print(record: dict[str, Any], path: Path | None) -> None:
    if record["stride"] is None:
        read = f"packed into blocks of {record['seq_len']} tokens, as the run validates"
    else:
        read = f"{record['seq_len']} tokens per window, stride {record['stride']}"
    print(f"{record['checkpoint']} on {record['data']}, {read}")
    print(f"loss        {record['loss']:.6f} nats per token")
    print(f"perplexity  {record['perplexity']:.4f}")
    print(f"tokens      {record['tokens']:,}")
    print(f"tokens/s    {record['tokens_per_second']:,.0f}")
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")
