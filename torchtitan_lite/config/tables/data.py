"""The data keys of [training], and the tables below it. Names and meanings follow torchtitan 0.2.2;
texts state different defaults."""

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from torchtitan_lite.config.tables.section import (
    NoEffect,
    Section,
    above,
    at_least,
    between,
    positive_or_minus_one,
)

DEFAULT_DATASET = "python_stdlib"
TEXT_DATASETS = (DEFAULT_DATASET, "c4", "c4_validation")
"""Data sets known by name; none contains conversations."""
_PINNED = NoEffect("batches for a GPU are always in pinned memory")
_WORKERS = NoEffect("tokens are read from a memory map, and a background thread reads ahead")


class CorpusConfig(Section):
    """A corpus of a weighted blend: `[[training.corpora]]`."""

    dataset: str = DEFAULT_DATASET
    """What to read: "python_stdlib", "c4", "c4_validation", a format ("json", "jsonl", "parquet",
    "arrow", "text") together with `dataset_path`, or a name on the Hugging Face hub."""

    dataset_path: str | None = None
    """A local file, folder or glob. The format follows from the file extensions unless `dataset`
    names one. A relative path is taken from the working directory."""

    dataset_config: str | None = None
    """Name of the configuration (subset) of a data set on the hub."""

    dataset_split: str = "train"
    """Split of a data set on the hub, and of a local folder whose file names are those of several
    splits: train, validation and test. Other local files, and text files, have no splits."""

    text_column: str = "text"
    """Column with the text of a document. Files of the "text" format have only this one."""

    messages_column: str | None = None
    """Set for a chat data set, usually to "messages": the column with the messages of a
    conversation, each with `role` and `content`. The tokenizer's chat template makes a document of
    them, and only assistant tokens have a loss. Takes the place of `text_column`."""

    max_unusable_fraction: Annotated[float, between(0, 1)] = 0.01
    """Largest fraction of a corpus's rows that may have no usable text: no such column, null,
    another type. They are left out with a warning that names the first; more are an error. Empty
    texts do not count."""

    streaming: bool = False
    """Read the data set as a stream instead of tokenizing all of it before the first step."""

    shuffle_window: Annotated[int, at_least(0)] = 0
    """Number of consecutive blocks of a stream that are shuffled together, whose tokens are held in
    memory twice (4 bytes each). 0: samples have the order of the stream."""

    weight: Annotated[float, above(0)] = 1.0
    """Fraction of the samples from this corpus, relative to the other corpora's weights."""


class DataLoaderConfig(Section):
    """How batches are loaded. The keys are torchtitan's."""

    num_workers: Annotated[int, at_least(0), _WORKERS] = 0
    """Accepted and without effect: tokens are read from a memory map, and one background thread
    reads ahead."""

    persistent_workers: Annotated[bool, _WORKERS] = False
    """Accepted and without effect: there are no worker processes."""

    pin_memory: Annotated[bool, _PINNED] = False
    """Accepted and without effect: batches for a GPU are always in pinned memory, others never."""

    prefetch_factor: Annotated[int | None, _WORKERS] = None
    """Accepted and without effect: the next step's batches are read ahead."""


class TrainingDataLoaderConfig(DataLoaderConfig):
    """How batches for training are loaded."""

    num_workers: Annotated[int, at_least(0)] = 0
    """Processes per node that tokenize the documents of streams. 0: the rank that reads them for
    the node tokenizes in a background thread. Without effect on other corpora, which are tokenized
    before the first step and read from a memory map."""


class DataConfig(Section):
    """The data keys of `[training]`; the section of that name extends this one."""

    dataset: str = DEFAULT_DATASET
    """What to train on: "python_stdlib" (the source of the Python standard library on this
    machine, no download), "c4", "c4_validation", a format ("json", "jsonl", "parquet", "arrow",
    "text") together with `dataset_path`, a name that `experimental.custom_import` registers, or a
    name on the Hugging Face hub. torchtitan's default
    is "c4_test", a fixture of its own repository."""

    dataset_path: str | None = None
    """A local file, folder or glob to read instead of downloading. The format follows from the
    file extensions unless `dataset` names one."""

    dataset_config: str | None = None
    """Name of the configuration (subset) of a data set on the hub."""

    dataset_split: str = "train"
    """Split of a data set on the hub, and of a local folder whose file names are those of several
    splits: train, validation and test. Other local files, and text files, have no splits."""

    text_column: str = "text"
    """Column with the text of a document."""

    messages_column: str | None = None
    """Set for a chat data set, usually to "messages": the column with the messages of a
    conversation, each with `role` and `content`. The tokenizer's chat template makes a document of
    them, and only assistant tokens have a loss. Takes the place of `text_column`."""

    max_unusable_fraction: Annotated[float, between(0, 1)] = 0.01
    """Largest fraction of a corpus's rows that may have no usable text: no such column, null,
    another type. They are left out with a warning that names the first; more are an error. Empty
    texts do not count."""

    streaming: bool = False
    """Read the data set as a stream instead of tokenizing all of it before the first step.
    torchtitan always streams."""

    shuffle_window: Annotated[int, at_least(0)] = 0
    """Number of consecutive blocks of a stream that are shuffled together, whose tokens are held in
    memory twice (4 bytes each). 0: samples have the order of the stream, as in torchtitan."""

    corpora: list[CorpusConfig] = Field(default_factory=list)
    """Several corpora blended by weight, each a `[[training.corpora]]` table. Replaces `dataset`
    and its keys."""

    held_out_fraction: Annotated[float, between(0, 0.5)] = 0.0
    """Fraction of the documents held out for validation, chosen by a hash of the document's text.
    They are never trained on, whether or not validation is enabled."""

    cache_folder: str = "~/.cache/torchtitan_lite"
    """Cache of tokenized corpora and trained tokenizers. Can be deleted at any time between runs;
    processes on one machine share it."""

    local_batch_size: Annotated[int, at_least(1)] = 8
    """Samples per microbatch and rank."""

    global_batch_size: Annotated[int, positive_or_minus_one()] = -1
    """Samples per optimizer step over all ranks; -1 means `local_batch_size` times the number of
    ranks with different samples. Larger batches accumulate gradients."""

    batch_size_warmup: list[list[int]] = Field(default_factory=list)
    """Stages [samples, global batch size] with smaller steps, before those of `global_batch_size`:
    with [[1000, 8], [4000, 16]], steps that begin within the first 1000 samples have 8, and those
    within the next 4000 have 16. A stage's last step may exceed it."""

    seq_len: Annotated[int, at_least(1)] = 2048
    """Target tokens per sample."""

    dataloader: TrainingDataLoaderConfig = TrainingDataLoaderConfig()
    """`[training.dataloader]`: how batches are loaded."""

    @model_validator(mode="after")
    def _one_way_to_name_the_data(self) -> "DataConfig":
        single = {
            key: getattr(self, key)
            for key in CorpusConfig.model_fields.keys() & type(self).model_fields.keys()
            if getattr(self, key) != type(self).model_fields[key].default
        }
        if self.corpora and single:
            single_keys = ", ".join(f"{key} = {value!r}" for key, value in single.items())
            raise ValueError(
                f"got {len(self.corpora)} corpora and also {single_keys}; name the data either in "
                f"[[training.corpora]] or in those keys, not in both"
            )
        return self

    @model_validator(mode="after")
    def _batches_grow(self) -> "DataConfig":
        if not self.batch_size_warmup:
            return self
        if any(len(stage) != 2 or min(stage) < 1 for stage in self.batch_size_warmup):
            raise ValueError(
                f"batch_size_warmup = {self.batch_size_warmup}: each stage must be a pair of "
                "positive integers, [samples, global batch size]"
            )
        sizes = [size for _, size in self.batch_size_warmup]
        batches = f"batch_size_warmup has global batches of {', '.join(map(str, sizes))}"
        if self.global_batch_size == -1:
            raise ValueError(
                f"{batches}, and global_batch_size = -1 follows the mesh; set it to the samples "
                "per step after the warm-up"
            )
        if any(size >= following for size, following in pairwise([*sizes, self.global_batch_size])):
            raise ValueError(
                f"{batches}, then global_batch_size = {self.global_batch_size}; each must be above "
                "the one before it"
            )
        return self

    def resolved_corpora(self) -> list[CorpusConfig]:
        """Return the corpora to blend: `corpora`, or the one of the keys beside it."""
        if self.corpora:
            return list(self.corpora)
        return [
            CorpusConfig(
                dataset=self.dataset,
                dataset_path=self.dataset_path,
                dataset_config=self.dataset_config,
                dataset_split=self.dataset_split,
                text_column=self.text_column,
                messages_column=self.messages_column,
                max_unusable_fraction=self.max_unusable_fraction,
                streaming=self.streaming,
                shuffle_window=self.shuffle_window,
            )
        ]
