"""Tokenizers: finding, loading and training, by Hugging Face's `tokenizers`.

A tokenizer is identified by a hash of its files, so that a warm start need not import `tokenizers`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.supervised import announce
from torchtitan_lite.data.atomic_folder import build_once
from torchtitan_lite.data.chat_template import DEFAULT_TEMPLATE, END_OF_TURN, TURN_TOKENS
from torchtitan_lite.data.conversations import read_conversations
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.documents import read_documents
from torchtitan_lite.data.row_files import refuse_pointer
from torchtitan_lite.data.tokenizer_folder import (
    CONFIG,
    FILES,
    SPECIAL_TOKENS,
    read_tokenizer_config,
    token_text,
)
from torchtitan_lite.data.unusable_rows import UnusableRows

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
_NUM_BYTES = 256
_BOS_NAMES = (BOS, "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|endoftext|>", "<|im_end|>")
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")
_TRAINING_BYTES = 64 * 2**20
_FORMAT = 1


class Tokenizer:
    """A tokenizer, with the ids that begin and end a document."""

    def __init__(
        self,
        inner: Any,
        bos_id: int | None,
        eos_id: int | None,
        *,
        named_bos_id: int | None = None,
    ) -> None:
        """`bos_id` begins a document, `eos_id` ends it. `named_bos_id`: the id named so, which need
        not begin documents."""
        self._inner = inner
        # What the file stores is applied to every text. As in transformers, nothing is cut or
        # padded unless asked.
        inner.no_truncation()
        inner.no_padding()
        # Merges that are skipped at random would make the tokens depend on the reading rank.
        if getattr(inner.model, "dropout", None):
            logger.warning(
                "the tokenizer skips merges at random (dropout = %g in tokenizer.json): this is "
                "switched off, so that a text always has the same tokens",
                inner.model.dropout,
            )
            inner.model.dropout = None
        # Text that looks like a special token is encoded as ordinary text, so
        # that no document can forge a document boundary.
        self._inner.encode_special_tokens = True
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.named_bos_id = bos_id if named_bos_id is None else named_bos_id
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        added = inner.get_added_tokens_decoder().values()
        self.special_texts = tuple(str(token.content) for token in added if token.special)
        """The texts of special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, without special tokens."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Encode rendered conversations: ids (uint32), with special tokens as spelled in the text,
        and the characters [begin, end) of each token (int64)."""
        self._inner.encode_special_tokens = False
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        places = [np.array(e.offsets, dtype=np.int64).reshape(-1, 2) for e in encodings]
        return [
            (np.array(encoding.ids, dtype=np.uint32), place[:, 0], place[:, 1])
            for encoding, place in zip(encodings, places, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` without special tokens."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        self._inner.save(str(folder / "tokenizer.json"))
        names = {
            key: None if id is None else self._inner.id_to_token(id)
            for key, id in (("bos_token", self.bos_id), ("eos_token", self.eos_id))
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer on disk that is not loaded yet."""

    folder: Path
    fingerprint: str

    def load(self) -> Tokenizer:
        return load_tokenizer(self.folder)


def open_tokenizer(
    hf_assets_path: str | None, corpora: Sequence[Corpus], vocab_size: int, cache_folder: Path
) -> TokenizerFiles:
    """Open the tokenizer in `hf_assets_path`, or train one on `corpora` once and cache it; with
    conversations among them it has a chat template."""
    if hf_assets_path is not None:
        folder = Path(hf_assets_path).expanduser()
        _require_file(folder)
    else:
        chat = any(corpus.is_chat for corpus in corpora)
        folder = _trained_folder(corpora, vocab_size, cache_folder)

        def build(temporary: Path) -> None:
            announce("training tokenizer")
            names = ", ".join(corpus.name for corpus in corpora)
            logger.info("training a tokenizer of %d tokens on %s", vocab_size, names)
            train_tokenizer(_first_documents(corpora), vocab_size, chat=chat).save(temporary)
            if chat:
                (temporary / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)

        build_once(folder, "the trained tokenizer", build)
    return TokenizerFiles(folder=folder, fingerprint=_fingerprint(folder))


def trained_tokenizer(
    corpora: Sequence[Corpus], vocab_size: int, cache_folder: Path
) -> TokenizerFiles | None:
    """Return the tokenizer that `open_tokenizer` trained on `corpora`; None if it is not cached."""
    folder = _trained_folder(corpora, vocab_size, cache_folder)
    if not (folder / "tokenizer.json").is_file():
        return None
    return TokenizerFiles(folder=folder, fingerprint=_fingerprint(folder))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer in `folder`: tokenizer.json, and the settings beside it for the tokens
    that only they define and the names of those that begin and end a document (by default the
    usual names; null: none). Raises DataError."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    folder = Path(folder).expanduser()
    file = _require_file(folder)
    try:
        inner = HuggingFaceTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} is not a tokenizer that can be read: {error}") from error
    config = read_tokenizer_config(folder)
    _add_tokens_of_config(inner, config, folder / CONFIG)
    named_bos_id = _special_id(inner, config, "bos_token", _BOS_NAMES)
    return Tokenizer(
        inner,
        bos_id=None if config.get("add_bos_token") is False else named_bos_id,
        eos_id=_special_id(inner, config, "eos_token", _EOS_NAMES),
        named_bos_id=named_bos_id,
    )


def special_ids(folder: Path | None) -> dict[str, int | None]:
    """Return the ids that begin and end a document as transformers names them; empty without a
    tokenizer in `folder`. Raises DataError as `load_tokenizer` does."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return {}
    tokenizer = load_tokenizer(folder)
    return {"bos_token_id": tokenizer.named_bos_id, "eos_token_id": tokenizer.eos_id}


def train_tokenizer(documents: Iterable[str], vocab_size: int, *, chat: bool = False) -> Tokenizer:
    """Train a byte-level BPE (Sennrich, Haddow and Birch 2016; over bytes as in GPT-2) of at most
    `vocab_size` tokens, special ones included, deterministically. With `chat` it has the tokens of
    `DEFAULT_TEMPLATE`, and the end of a turn is its end of a text."""
    special_tokens = [BOS, EOS, *(TURN_TOKENS if chat else ())]
    needed = _NUM_BYTES + len(special_tokens)
    if vocab_size < needed:
        raise DataError(
            f"a tokenizer of {vocab_size} tokens cannot be trained: {_NUM_BYTES} bytes and "
            f"{len(special_tokens)} special tokens need {needed}. Use a model with a larger "
            f"vocabulary, or set model.hf_assets_path to the folder of a tokenizer."
        )
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = HuggingFaceTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer=trainer)
    eos = END_OF_TURN if chat else EOS
    return Tokenizer(inner, bos_id=inner.token_to_id(BOS), eos_id=inner.token_to_id(eos))


def check_vocab_size(folder: Path, tokenizer_vocab_size: int, vocab_size: int) -> None:
    """Raise DataError if the tokenizer has ids without an embedding."""
    if tokenizer_vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer_vocab_size} tokens, but the model's "
            f"vocabulary is {vocab_size}. Choose a model flavor with vocab_size >= "
            f"{tokenizer_vocab_size}, or another model.hf_assets_path."
        )


def _trained_folder(corpora: Sequence[Corpus], vocab_size: int, cache_folder: Path) -> Path:
    parts = [str(_FORMAT), str(vocab_size), *(corpus.fingerprint for corpus in corpora)]
    parts += [DEFAULT_TEMPLATE] if any(corpus.is_chat for corpus in corpora) else []
    key = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
    return cache_folder / "tokenizers" / key


def _require_file(folder: Path) -> Path:
    file = folder / "tokenizer.json"
    if not file.is_file():
        problem = "that folder does not exist"
        if folder.is_dir():
            names = sorted(path.name for path in folder.iterdir())[:8]
            problem = f"that folder contains {', '.join(names) or 'nothing'}"
        elif folder.exists():
            problem = "that is a file"
        raise DataError(
            f'model.hf_assets_path = "{folder}" has no tokenizer.json ({problem}). Set it to a '
            f"folder with the tokenizer files of a Hugging Face model, or omit it to train a "
            f"tokenizer on the corpus."
        )
    refuse_pointer(file)
    return file


def _fingerprint(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in FILES:
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else b"")
        digest.update(b"\x1f")
    return digest.hexdigest()


def _add_tokens_of_config(inner: Any, config: Any, config_file: Path) -> None:
    """Add the tokens that only tokenizer_config.json defines, in the order of
    `transformers.PreTrainedTokenizerFast`: `added_tokens_decoder` by id, then the special tokens.
    A token that is not in the vocabulary gets the next free id, whatever id the file gives it."""
    from tokenizers import AddedToken

    try:
        listed = config.get("added_tokens_decoder") or {}
        by_id = [listed[id] for id in sorted(listed, key=int)]
        named = [config[key] for key in SPECIAL_TOKENS if config.get(key) is not None]
        named += [*(config.get("additional_special_tokens") or ())]
        more = config.get("extra_special_tokens") or ()
        named += [*(more.values() if isinstance(more, dict) else more)]
        named = [{"content": token} if isinstance(token, str) else token for token in named]
        # A named token is special; a listed one has its own flag.
        candidates = [*by_id, *({**token, "special": True} for token in named)]
        existing = {token.content for token in inner.get_added_tokens_decoder().values()}
        for token in candidates:
            if token["content"] in existing:
                continue
            existing.add(token["content"])
            is_special = token.get("special", False)
            options = {option: token[option] for option in _TOKEN_OPTIONS if option in token}
            added = AddedToken(token["content"], special=is_special, **options)
            (inner.add_special_tokens if is_special else inner.add_tokens)([added])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{config_file} defines its tokens in a way that cannot be read "
            f"({type(error).__name__}: {error})."
        ) from error


def _special_id(
    inner: Any, config: dict[str, Any], key: str, usual_names: tuple[str, ...]
) -> int | None:
    if key in config:
        # Null: the tokenizer has no such token, whatever its vocabulary contains.
        return None if config[key] is None else inner.token_to_id(token_text(config[key]))
    ids = (inner.token_to_id(usual) for usual in usual_names)
    return next((id for id in ids if id is not None), None)


def _first_documents(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yield the first documents of each corpus, `_TRAINING_BYTES` in total: more text hardly
    changes the merges, and a stream may be infinite."""
    return chain.from_iterable(
        _up_to(_texts(corpus), _TRAINING_BYTES // len(corpora)) for corpus in corpora
    )


def _texts(corpus: Corpus) -> Iterator[str]:
    """Yield the texts of a corpus; tokenization reports rows without one."""
    unusable = UnusableRows(corpus)
    if corpus.is_chat:
        for conversation in read_conversations(corpus, unusable):
            yield from conversation.message_texts()
    else:
        yield from read_documents(corpus, unusable)
    unusable.check()


def _up_to(texts: Iterator[str], limit_bytes: int) -> Iterator[str]:
    num_bytes = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode())
        if num_bytes >= limit_bytes:
            return
