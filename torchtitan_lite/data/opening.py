"""Building the data loader and the validation set from the settings.

Every process that calls `open_data` with the same settings gets the same data, and with a warm
cache none of them imports `datasets` or `tokenizers` (unless a corpus is streamed).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.config.tables.data import CorpusConfig, DataConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.held_out import DocumentWindows, ValidationData
from torchtitan_lite.data.loader import CorpusSource, DataLoader
from torchtitan_lite.data.node_streams import NodeStreams
from torchtitan_lite.data.online import OnlineBlocks, is_online
from torchtitan_lite.data.packing import PackedBlocks
from torchtitan_lite.data.stream import StreamedBlocks
from torchtitan_lite.data.stream_reader import StreamReader
from torchtitan_lite.data.token_cache import CachedTokens, TokenizedCorpus, open_token_cache
from torchtitan_lite.data.tokenization import DocumentTokenizer, TokenizationWorkers
from torchtitan_lite.data.tokenizer import (
    Tokenizer,
    TokenizerFiles,
    check_vocab_size,
    open_tokenizer,
)


@dataclass(frozen=True, kw_only=True)
class OpenedData:
    """The data of a run."""

    loader: DataLoader
    validation: ValidationData | None
    tokenizer_files: TokenizerFiles
    _loaded: list[Tokenizer] = field(default_factory=list, repr=False)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded at the first call."""
        if not self._loaded:
            self._loaded.append(self.tokenizer_files.load())
        return self._loaded[0]


def open_data(
    config: DataConfig,
    validation: ValidationConfig,
    *,
    hf_assets_path: str | None,
    vocab_size: int,
    seed: int,
    document_mask: bool,
    pin_memory: bool,
    node: NodeStreams | None = None,
) -> OpenedData:
    """Open, tokenize (once) and pack the data of a run. Every rank must call it.

    `vocab_size` is the model's; without `hf_assets_path` a tokenizer of that size is trained on the
    corpora. `node` shares streams with the other ranks of the node; to be closed after the data.
    Raises DataError.
    """
    cache_folder = Path(config.cache_folder).expanduser().absolute()
    settings = config.resolved_corpora()
    opened_corpora = [None if is_online(corpus) else open_corpus(corpus) for corpus in settings]
    corpora = [corpus for corpus in opened_corpora if corpus is not None]
    if hf_assets_path is None and not corpora:
        raise DataError(
            f'training.dataset = "{settings[0].dataset}" is an online data set, which has no '
            "documents to train a tokenizer on. Set model.hf_assets_path to a tokenizer's folder."
        )
    files = open_tokenizer(hf_assets_path, corpora, vocab_size, cache_folder)
    opened = _Opener(
        config=config, tokenizer=files, vocab_size=vocab_size, cache_folder=cache_folder
    )
    if not document_mask and any(corpus.is_chat for corpus in corpora):
        warn_on_rank_0(
            "without document masks the model attends to preceding conversations in the same "
            'block: set model.attention_mask = "document" to separate them'
        )
    tokenized = [
        None if corpus is None or corpus.streaming else opened.tokenize(corpus)
        for corpus in opened_corpora
    ]
    if config.dataloader.num_workers and not any(corpus.streaming for corpus in corpora):
        logger.info(
            "training.dataloader.num_workers = %d has no effect here: no corpus is a stream",
            config.dataloader.num_workers,
        )
    sources = [
        opened.source(corpus, part, setting, node)
        for corpus, part, setting in zip(opened_corpora, tokenized, settings, strict=True)
    ]
    if node is not None:
        node.start()
    loader = DataLoader(
        sources,
        seq_len=config.seq_len,
        seed=seed,
        document_mask=document_mask,
        pin_memory=pin_memory,
    )
    validation_data = None
    if validation.enable:
        validation_data = opened.validation_data(
            validation, tokenized, seed=seed, document_mask=document_mask, pin_memory=pin_memory
        )
    return OpenedData(loader=loader, validation=validation_data, tokenizer_files=files)


def open_validation(
    config: DataConfig,
    validation: ValidationConfig,
    tokenizer: TokenizerFiles,
    *,
    vocab_size: int,
    seed: int,
    document_mask: bool,
    pin_memory: bool,
    stride: int | None = None,
) -> ValidationData:
    """Open the validation set only: the held-out documents of the training corpora, unless
    `validation` names a set. With `stride` it is read document by document, in windows
    (`DocumentWindows`). Every rank must call it. Raises DataError."""
    cache_folder = Path(config.cache_folder).expanduser().absolute()
    opened = _Opener(
        config=config, tokenizer=tokenizer, vocab_size=vocab_size, cache_folder=cache_folder
    )
    tokenized: list[TokenizedCorpus | None] = []
    if validation.corpus() is None and config.held_out_fraction:
        corpora = [open_corpus(corpus) for corpus in config.resolved_corpora()]
        tokenized = [None if corpus.streaming else opened.tokenize(corpus) for corpus in corpora]
    return opened.validation_data(
        validation,
        tokenized,
        seed=seed,
        document_mask=document_mask,
        pin_memory=pin_memory,
        stride=stride,
    )


@dataclass(frozen=True, kw_only=True)
class _Opener:
    """Builds the parts of a run's data."""

    config: DataConfig
    tokenizer: TokenizerFiles
    vocab_size: int
    cache_folder: Path

    def tokenize(self, corpus: Corpus, held_out_fraction: float | None = None) -> TokenizedCorpus:
        if held_out_fraction is None:
            held_out_fraction = self.config.held_out_fraction
        return open_token_cache(
            corpus,
            self.tokenizer,
            held_out_fraction=held_out_fraction,
            vocab_size=self.vocab_size,
            cache_folder=self.cache_folder,
        )

    def source(
        self,
        corpus: Corpus | None,
        tokenized: TokenizedCorpus | None,
        setting: CorpusConfig,
        node: NodeStreams | None,
    ) -> CorpusSource:
        """Return the source of `setting`: `corpus` is None for an online data set, and `tokenized`
        also for a stream."""
        if corpus is None:
            return self.online(setting)
        if tokenized is None:
            return self.stream(corpus, setting, node)
        return self.table(tokenized, setting.weight)

    def online(self, setting: CorpusConfig) -> CorpusSource:
        name = setting.dataset
        blocks = OnlineBlocks(
            name,
            REGISTRY.online_datasets[name](setting.dataset_path),
            self.config.seq_len,
            self.vocab_size,
        )
        logger.info("corpus %s: an online data set, in blocks of %d", name, self.config.seq_len)
        return CorpusSource(name=name, weight=setting.weight, digest=None, blocks=blocks)

    def table(self, tokenized: TokenizedCorpus, weight: float) -> CorpusSource:
        part = tokenized.train
        blocks = PackedBlocks(
            part.tokens,
            part.document_starts,
            self.config.seq_len,
            target_bounds=part.target_bounds,
            name=f"the corpus {tokenized.name!r}",
            remedy="lower training.seq_len or add documents",
        )
        logger.info(
            "corpus %s: %s tokens%s in %s documents, %s blocks of %d",
            tokenized.name,
            f"{len(part.tokens):,}",
            "" if part.target_bounds is None else f" ({part.num_targets:,} of them targets)",
            f"{len(part.document_starts):,}",
            f"{blocks.num_blocks:,}",
            self.config.seq_len,
        )
        return CorpusSource(name=tokenized.name, weight=weight, digest=part.digest, blocks=blocks)

    def stream(
        self, corpus: Corpus, setting: CorpusConfig, node: NodeStreams | None
    ) -> CorpusSource:
        tokenizer = self.tokenizer.load()
        check_vocab_size(self.tokenizer.folder, tokenizer.vocab_size, self.vocab_size)
        num_workers, window = self.config.dataloader.num_workers, max(1, setting.shuffle_window)
        reader = StreamReader(
            corpus,
            TokenizationWorkers(self.tokenizer.folder, num_workers)
            if num_workers
            else DocumentTokenizer(tokenizer),
            held_out_fraction=self.config.held_out_fraction,
        )
        blocks = StreamedBlocks(
            reader if node is None else node.share(reader),
            self.config.seq_len,
            shuffle_window=window,
        )
        logger.info("corpus %s: a stream, in blocks of %d", corpus.name, self.config.seq_len)
        return CorpusSource(
            name=corpus.name,
            weight=setting.weight,
            digest=None,
            blocks=blocks,
            shuffle_window=window,
        )

    def validation_data(
        self,
        validation: ValidationConfig,
        tokenized: list[TokenizedCorpus | None],
        *,
        seed: int,
        document_mask: bool,
        pin_memory: bool,
        stride: int | None = None,
    ) -> ValidationData:
        seq_len = validation.seq_len or self.config.seq_len
        return ValidationData(
            self.validation_parts(validation, tokenized, seq_len, stride),
            seq_len=seq_len,
            local_batch_size=validation.local_batch_size,
            steps=validation.steps,
            seed=seed,
            document_mask=document_mask,
            pin_memory=pin_memory,
        )

    def validation_parts(
        self,
        validation: ValidationConfig,
        tokenized: list[TokenizedCorpus | None],
        seq_len: int,
        stride: int | None,
    ) -> Sequence[PackedBlocks | DocumentWindows]:
        own = validation.corpus()
        if own is not None:
            corpus = open_corpus(own)
            whole = self.tokenize(corpus, held_out_fraction=0.0)
            part = _Part(whole.train, f"the validation set {whole.name!r}", "add documents")
            return [self.blocks(part, seq_len, stride)]
        fraction = self.config.held_out_fraction
        if fraction == 0:
            raise DataError(
                "validation.enable = true without a validation.dataset uses the held-out "
                "documents of the training corpus, but training.held_out_fraction = 0.0. Set it, "
                "for example to 0.01, or set validation.dataset."
            )
        if None in tokenized:
            raise DataError(
                "the held-out documents of a corpus with streaming = true, or of an online data "
                "set, are not known in advance, so they cannot be used for validation. Set "
                "validation.dataset."
            )
        return [
            self.blocks(
                _Part(
                    corpus.held_out,
                    f"the held-out part ({fraction:g} of the documents) of {corpus.name!r}",
                    "raise training.held_out_fraction, or set validation.dataset",
                ),
                seq_len,
                stride,
            )
            for corpus in tokenized
            if corpus is not None
        ]

    def blocks(
        self, part: "_Part", seq_len: int, stride: int | None
    ) -> PackedBlocks | DocumentWindows:
        tokens = part.tokens
        if stride is None:
            return PackedBlocks(
                tokens.tokens,
                tokens.document_starts,
                seq_len,
                target_bounds=tokens.target_bounds,
                name=part.name,
                remedy=f"lower validation.seq_len, or {part.remedy}",
            )
        tokenizer = self.tokenizer.load()
        is_chat = tokens.target_bounds is not None
        return DocumentWindows(
            tokens.tokens,
            tokens.document_starts,
            seq_len,
            stride=stride,
            # Like lm-eval: the end token if the tokenizer has no begin token.
            prefix=tokenizer.eos_id if tokenizer.bos_id is None and not is_chat else None,
            num_after=int(tokenizer.eos_id is not None and not is_chat),
            target_bounds=tokens.target_bounds,
            name=part.name,
            remedy=part.remedy,
        )


@dataclass(frozen=True)
class _Part:
    """Validation documents."""

    tokens: CachedTokens
    name: str
    remedy: str
    """Remedy if they are too few for a block."""
