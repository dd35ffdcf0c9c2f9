"""The [validation] table."""

from typing import Annotated

from torchtitan_lite.config.tables.data import DEFAULT_DATASET, CorpusConfig, DataLoaderConfig
from torchtitan_lite.config.tables.section import Section, at_least, between, positive_or_minus_one


class ValidationConfig(Section):
    """`[validation]`: the loss on held-out data."""

    enable: bool = False
    """Measure the validation loss during training."""

    dataset: str | None = None
    """Validation set, named as in `[training]`. Unset: the held-out documents of the training
    corpora (see `training.held_out_fraction`), or the files in `dataset_path`. torchtitan's default
    is "c4_validation"."""

    dataset_path: str | None = None
    """A local file, folder or glob to validate on."""

    dataset_config: str | None = None
    """Name of the configuration (subset) of a validation set on the hub."""

    dataset_split: str = "train"
    """Split of a validation set on the hub, or of a local folder with files of several splits."""

    text_column: str = "text"
    """Column of the validation set with the text of a document."""

    messages_column: str | None = None
    """Column of the validation set that holds the messages of a conversation. Set for a chat data
    set, as in `[training]`; held-out documents need it not."""

    max_unusable_fraction: Annotated[float, between(0, 1)] = 0.01
    """Largest fraction of the validation set's rows that may have no usable text, as in
    `[training]`."""

    local_batch_size: Annotated[int, at_least(1)] = 8
    """Samples per rank and batch in validation."""

    seq_len: Annotated[int, at_least(1)] | None = None
    """Target tokens per validation sample. Unset: `training.seq_len`; torchtitan's default is 2048.
    """

    freq: Annotated[int, at_least(1)] = 10
    """Steps between validations."""

    steps: Annotated[int, positive_or_minus_one()] = -1
    """Rounds of `local_batch_size` samples per rank; -1 means the entire validation set. Every rank
    takes part in every round."""

    samples: Annotated[int, at_least(0)] = 0
    """Texts generated in each validation, for the console, metrics.jsonl and TensorBoard (not in
    torchtitan). More than 0 needs memory for another copy of the weights, in `training.dtype` and
    without float8; tensor parallelism shards it over as many ranks as possible."""

    sample_prompt: str = ""
    """Prompt of these texts. Empty: the start of a document. In a run on conversations, a message
    to the assistant; empty: the first question of its data."""

    sample_tokens: Annotated[int, at_least(1)] = 80
    """Maximum tokens of such a text, and of the sample that a finished run prints."""

    sample_temperature: Annotated[float, at_least(0)] = 0.8
    """Temperature of these texts and of that sample; 0 takes the most likely token."""

    dataloader: DataLoaderConfig = DataLoaderConfig()
    """`[validation.dataloader]`: how batches are loaded."""

    def corpus(self) -> CorpusConfig | None:
        """Return the validation set, or None for the held-out documents of the training corpora."""
        if self.dataset is None and self.dataset_path is None:
            return None
        return CorpusConfig(
            dataset=self.dataset or DEFAULT_DATASET,
            dataset_path=self.dataset_path,
            dataset_config=self.dataset_config,
            dataset_split=self.dataset_split,
            text_column=self.text_column,
            messages_column=self.messages_column,
            max_unusable_fraction=self.max_unusable_fraction,
        )
