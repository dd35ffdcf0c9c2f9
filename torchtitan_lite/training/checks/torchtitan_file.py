"""Files of torchtitan, and the defaults that make them train something else here.

Invariant: a line is about a value that neither the file nor the command line has set.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.config.keys import all_keys, without_effect
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.section import toml_literal
from torchtitan_lite.config.toml_file import read_toml
from torchtitan_lite.config.torchtitan_keys import (
    DEFAULTS,
    KEYS,
    ROUTER_BIAS_UPDATE_RATE,
    VERSION,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.models import model_spec
from torchtitan_lite.training.checks.mesh_constraints import on_gpu


def is_torchtitan_file(tables: Mapping[str, Any]) -> bool:
    """Whether a file sets only keys that torchtitan 0.2.2 has too, and one that means something to
    torchtitan alone: a key without effect or of an unsupported feature here, or a module of
    torchtitan."""
    values = dict(_values(tables, ()))
    here = all_keys(Config)

    def is_foreign(name: str) -> bool:
        key = here.get(name)
        if key is None or key.no_effect is not None or key.is_unsupported:
            return True
        return str(values[name]).startswith("torchtitan.")

    return values.keys() <= _TORCHTITAN_KEYS and any(map(is_foreign, values))


def differing_defaults(config: Config) -> dict[str, str]:
    """Return one line for each default that changes the mathematics, is another than torchtitan's
    and is left unset, by its key: the value there and here, and what gives torchtitan's
    behavior."""
    return {
        key: f"{key} is not set: {text}"
        for part in (_of_model, _of_data, _of_arithmetic, _of_replicas)
        for key, text in part(config)
    }


def log_about_keys(config: Config, file: Path) -> None:
    """Log which keys have no effect and, for a file of torchtitan, which of its defaults differ
    here."""
    if not logger.isEnabledFor(logging.INFO):
        # Rank 0 logs them.
        return
    for line in without_effect(config):
        logger.info("%s", line)
    if is_torchtitan_file(read_toml(file)) and (lines := differing_defaults(config)):
        logger.info(
            "%s is a file of torchtitan: its defaults of %s differ here. See "
            "docs/from_torchtitan.md.",
            file,
            ", ".join(lines),
        )
        for line in lines.values():
            logger.debug("%s", line)


_TORCHTITAN_KEYS = {f"{table}.{key}" for table, keys in KEYS.items() for key in keys.split()}


def _values(tables: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        here = (*path, name)
        if isinstance(value, Mapping):
            yield from _values(value, here)
        else:
            yield ".".join(here), value


def _is_set(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(config, section).model_fields_set


def _line(key: str, there: str, here: str, remedy: str) -> tuple[str, str]:
    return key, f"torchtitan {VERSION} {there}, this run {here}. {remedy}."


def _of_model(config: Config) -> Iterator[tuple[str, str]]:
    spec = model_spec(config.model)
    if spec.num_experts and not _is_set(config, "model.router_bias_update_rate"):
        rate = getattr(getattr(spec.dims, "moe", None), "bias_update_rate", None)
        if rate != ROUTER_BIAS_UPDATE_RATE:
            yield _line(
                "model.router_bias_update_rate",
                f"balances experts by steps of {ROUTER_BIAS_UPDATE_RATE}",
                f"by steps of {rate}",
                f"For torchtitan's, set it to {ROUTER_BIAS_UPDATE_RATE}",
            )
    if not _is_set(config, "model.hf_assets_path"):
        there = DEFAULTS["model.hf_assets_path"]
        yield _line(
            "model.hf_assets_path",
            f"reads the tokenizer in {toml_literal(there)}",
            "trains a tokenizer on its corpus",
            "For torchtitan's, set it to that folder",
        )


def _of_data(config: Config) -> Iterator[tuple[str, str]]:
    training, validation = config.training, config.validation
    if not (_is_set(config, "training.dataset") or training.dataset_path or training.corpora):
        yield _line(
            "training.dataset",
            f"trains on {toml_literal(DEFAULTS['training.dataset'])}",
            f"on {toml_literal(training.dataset)}",
            "For torchtitan's, set training.dataset_path to its tests/assets/c4_test",
        )
    if not (_is_set(config, "training.streaming") or training.corpora):
        yield _line(
            "training.streaming",
            "reads the documents in their order",
            "tokenizes all of them before the first step and shuffles their blocks",
            "For torchtitan's, set it to true",
        )
    if (
        validation.enable
        and not _is_set(config, "validation.seq_len")
        and training.seq_len != DEFAULTS["validation.seq_len"]
    ):
        yield _line(
            "validation.seq_len",
            f"validates with {DEFAULTS['validation.seq_len']}",
            f"with training.seq_len = {training.seq_len}",
            f"For torchtitan's, set it to {DEFAULTS['validation.seq_len']}",
        )


def _of_arithmetic(config: Config) -> Iterator[tuple[str, str]]:
    key = "training.mixed_precision_param"
    computed = "bfloat16" if on_gpu(config) else config.training.dtype
    if not _is_set(config, key) and computed != DEFAULTS[key]:
        yield _line(
            key,
            f"computes in {DEFAULTS[key]}",
            f"in {computed}, because it has no GPU",
            f"For torchtitan's, set it to {toml_literal(DEFAULTS[key])}",
        )
    if config.optimizer.weight_decay and not _is_set(
        config, "optimizer.decay_norms_biases_embeddings"
    ):
        yield _line(
            "optimizer.decay_norms_biases_embeddings",
            f"applies weight_decay = {config.optimizer.weight_decay} to all parameters",
            "not to norms, biases and embeddings",
            "For torchtitan's, set it to true",
        )


def _of_replicas(config: Config) -> Iterator[tuple[str, str]]:
    section = config.fault_tolerance
    if section.enable and not _is_set(config, "fault_tolerance.world_size_mode"):
        yield _line(
            "fault_tolerance.world_size_mode",
            "gives each replica a global batch of its own",
            f"divides one global batch over the replicas ({toml_literal(section.world_size_mode)})",
            'For torchtitan\'s, set it to "dynamic"',
        )
