"""Checks of training data, validation data and samples."""

from collections.abc import Iterator
from glob import glob
from pathlib import Path

from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.data import TEXT_DATASETS, CorpusConfig, DataConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.core.urls import local_path
from torchtitan_lite.training.checks.mesh_constraints import (
    on_gpu,
)


def data_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the data of a run. Reads the file system."""
    yield from _conversations(config)
    yield from _shuffled_streams(config)
    yield from _validation(config)
    yield from _samples(config)
    yield from _files(config)


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
