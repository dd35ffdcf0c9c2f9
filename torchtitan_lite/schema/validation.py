"""The [validation] table."""

from typing import Annotated

from torchtitan_lite.schema.data import DEFAULT_DATASET, CorpusConfig, DataLoaderConfig
from torchtitan_lite.schema.section import Section, at_least, positive_or_minus_one


class ValidationConfig(Section):
    """`[validation]`: the loss on documents that are not trained on."""

    enable: bool = False
    """Measure the validation loss during training."""

    dataset: str | None = None
    """What to validate on, named as in `[training]`. Not set: the held-out documents of the
    training corpora (see `training.held_out_fraction`), or the files in `dataset_path`.
    torchtitan's default is "c4_validation"."""

    dataset_path: str | None = None
    """A local file, folder or glob to validate on."""

    dataset_config: str | None = None
    """Name of the configuration (subset) of a validation set on the hub."""

    dataset_split: str = "train"
    """Split of a validation set on the hub."""

    text_column: str = "text"
    """Column of the validation set that holds the text of a document."""

    messages_column: str | None = None
    """Column of the validation set that holds the messages of a conversation. Set for a chat data
    set, as in `[training]`; held-out documents need it not."""

    local_batch_size: Annotated[int, at_least(1)] = 8
    """Samples that one rank runs at once in validation."""

    seq_len: Annotated[int, at_least(1)] | None = None
    """Target tokens in a validation sample. Not set: `training.seq_len`; torchtitan's default is
    2048."""

    freq: Annotated[int, at_least(1)] = 10
    """Validate every this many steps."""

    steps: Annotated[int, positive_or_minus_one()] = -1
    """Rounds of `local_batch_size` samples on each rank; -1 means the whole validation set. Every
    rank takes part in every round."""

    samples: Annotated[int, at_least(0)] = 0
    """Texts that the model gives in each validation, for the console, metrics.jsonl and TensorBoard
    (not in torchtitan). More than 0 takes memory for a further copy of the weights, in
    `training.dtype` and without `model.converters`; tensor parallelism shares it between as many
    ranks as it can."""

    sample_prompt: str = ""
    """What these texts go on from. Empty: the start of a document."""

    sample_tokens: Annotated[int, at_least(1)] = 80
    """Tokens in such a text, at most."""

    sample_temperature: Annotated[float, at_least(0)] = 0.8
    """Temperature at which their tokens are drawn; 0 takes the likeliest."""

    dataloader: DataLoaderConfig = DataLoaderConfig()
    """`[validation.dataloader]`: how batches are loaded."""

    def corpus(self) -> CorpusConfig | None:
        """The validation set, or None for the held-out documents of the training corpora."""
        if self.dataset is None and self.dataset_path is None:
            return None
        return CorpusConfig(
            dataset=self.dataset or DEFAULT_DATASET,
            dataset_path=self.dataset_path,
            dataset_config=self.dataset_config,
            dataset_split=self.dataset_split,
            text_column=self.text_column,
            messages_column=self.messages_column,
        )
