"""A corpus as token ids in memory-mapped files, created once.

Invariants: a cache entry is complete; its name is a hash of everything that its content depends on;
and every process, whatever its rank, does the same. One pass over the documents writes two parts:
the training documents and the held-out ones. A conversation is a document.

CACHE/tokens/KEY/meta.json CACHE/tokens/KEY/{train,held_out}/tokens.bin uint16 or uint32,
concatenated CACHE/tokens/KEY/{train,held_out}/documents.bin int64, start of each document
CACHE/tokens/KEY/{train,held_out}/targets.bin int64, for conversations: start and end of each run of
targets; in texts all tokens are targets
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.supervised import announce
from torchtitan_lite.data.atomic_folder import build_once
from torchtitan_lite.data.chat_template import ChatTemplate, find_template
from torchtitan_lite.data.chat_tokens import tokenize_conversations
from torchtitan_lite.data.conversations import read_conversations
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.documents import read_documents
from torchtitan_lite.data.progress import progress
from torchtitan_lite.data.tokenizer import Tokenizer, TokenizerFiles, check_vocab_size
from torchtitan_lite.data.unusable_rows import UnusableRows

_FORMAT = 2
"""1: truncation and padding stored in tokenizer.json were applied, and some tokens were missing."""
_CHAT_FORMAT = 2
"""1: templates got neither tools nor other variables."""
_PARTS = ("train", "held_out")
_BATCH_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True)
class CachedTokens:
    """One part of a tokenized corpus."""

    tokens: np.ndarray
    document_starts: np.ndarray
    target_bounds: np.ndarray | None
    """Targets are the tokens [b0, b1), [b2, b3) and so on; None: all."""
    digest: str
    """Hash of the tokens, independent of where the files are."""

    @property
    def num_targets(self) -> int:
        """Number of target tokens."""
        if self.target_bounds is None:
            return len(self.tokens)
        return int((self.target_bounds[1::2] - self.target_bounds[::2]).sum())


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """Both parts of a tokenized corpus."""

    name: str
    train: CachedTokens
    held_out: CachedTokens


def open_token_cache(
    corpus: Corpus,
    tokenizer: TokenizerFiles,
    *,
    held_out_fraction: float,
    vocab_size: int,
    cache_folder: Path,
) -> TokenizedCorpus:
    """Open the tokens of `corpus` from the cache, or create it. Every process calls this alike."""
    parts = [str(_FORMAT), corpus.fingerprint, tokenizer.fingerprint, repr(held_out_fraction)]
    template = None
    if corpus.is_chat:
        template = find_template(tokenizer.folder)
        parts += [f"chat {_CHAT_FORMAT}", template.fingerprint]
    key = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
    folder = cache_folder / "tokens" / key

    def build(temporary: Path) -> None:
        announce("tokenizing")
        loaded = tokenizer.load()
        check_vocab_size(tokenizer.folder, loaded.vocab_size, vocab_size)
        built = UnusableRows(corpus)
        batches = (
            _texts(corpus, loaded, built)
            if template is None
            else _conversations(corpus, loaded, template, built)
        )
        _write(corpus, batches, loaded.vocab_size, held_out_fraction, built, temporary)

    build_once(folder, f"the tokens of {corpus.name}", build)
    meta = json.loads((folder / "meta.json").read_text())
    unusable = UnusableRows(corpus)
    unusable.load(meta["unusable_rows"])
    unusable.check()
    unusable.report()
    check_vocab_size(tokenizer.folder, meta["vocab_size"], vocab_size)
    dtype = _token_dtype(meta["vocab_size"])
    train, held_out = (_open_part(folder / part, meta["parts"][part], dtype) for part in _PARTS)
    return TokenizedCorpus(name=corpus.name, train=train, held_out=held_out)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is held out: a function of its text alone, so that neither its position
    nor other documents matter, and equal documents are never in both parts."""
    if fraction == 0:
        return False
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return each document as uint32 ids, with begin and end tokens if the tokenizer has them."""
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    encoded = tokenizer.encode_batch(texts)
    return [np.array(before + ids + after, dtype=np.uint32) for ids in encoded]


class _Document(NamedTuple):
    text: str
    """Decides the part that it belongs to."""
    ids: np.ndarray
    """uint32."""
    target_bounds: np.ndarray | None
    """int64, within the document; None: all ids are targets."""


def _texts(
    corpus: Corpus, tokenizer: Tokenizer, unusable: UnusableRows
) -> Iterator[list[_Document]]:
    """Yield the documents of a text corpus, in batches."""
    for texts in _batches(read_documents(corpus, unusable), len):
        yield [
            _Document(text, ids, None)
            for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
        ]


def _conversations(
    corpus: Corpus, tokenizer: Tokenizer, template: ChatTemplate, unusable: UnusableRows
) -> Iterator[list[_Document]]:
    """Yield the documents of a chat corpus with targets, in batches."""
    count = left_out = 0
    conversations = read_conversations(corpus, unusable, template.variables)
    for batch in _batches(conversations, lambda conversation: len(conversation.text)):
        tokenized = tokenize_conversations(tokenizer, template, batch, unusable)
        documents = [
            _Document(encoded.conversation.text, encoded.ids, encoded.target_bounds)
            for encoded in tokenized
            if len(encoded.target_bounds)
        ]
        count += len(tokenized)
        left_out += len(tokenized) - len(documents)
        yield documents
    if left_out:
        logger.warning(
            "corpus %s: %s of %s conversations have no assistant token and are skipped",
            corpus.name,
            f"{left_out:,}",
            f"{count:,}",
        )


def _write(
    corpus: Corpus,
    batches: Iterable[list[_Document]],
    vocab_size: int,
    fraction: float,
    unusable: UnusableRows,
    folder: Path,
) -> None:
    dtype = _token_dtype(vocab_size)
    with ExitStack() as opened:
        writers = {
            part: opened.enter_context(
                closing(_PartWriter(folder / part, dtype, with_targets=corpus.is_chat))
            )
            for part in _PARTS
        }
        advance = opened.enter_context(progress(f"tokenizing {corpus.name}", "documents"))
        for documents in batches:
            for document in documents:
                part = "held_out" if is_held_out(document.text, fraction) else "train"
                writers[part].add(document)
            advance(len(documents), sum(len(document.ids) for document in documents))
    unusable.check()
    if not any(writer.num_documents for writer in writers.values()):
        raise DataError(_empty_corpus_error(corpus))
    meta = {
        "format": _FORMAT,
        "corpus": corpus.name,
        "vocab_size": vocab_size,
        "held_out_fraction": fraction,
        "unusable_rows": unusable.values(),
        "parts": {part: writer.meta() for part, writer in writers.items()},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _empty_corpus_error(corpus: Corpus) -> str:
    if corpus.is_chat:
        return (
            f"the corpus {corpus.name!r} has no conversation with an assistant message. "
            f"Check dataset_path, messages_column and the roles of the messages."
        )
    return (
        f"the corpus {corpus.name!r} has no text in column {corpus.column!r}. Check "
        f"dataset_path and text_column."
    )


_Item = TypeVar("_Item")


def _batches(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield batches of about `_BATCH_BYTES`, for the tokenizer's threads."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _PartWriter:
    """Writes the files of one part."""

    def __init__(self, folder: Path, dtype: np.dtype, *, with_targets: bool) -> None:
        folder.mkdir()
        self._dtype = dtype
        self._tokens_file = (folder / "tokens.bin").open("wb")
        self._documents_file = (folder / "documents.bin").open("wb")
        self._targets_file = (folder / "targets.bin").open("wb") if with_targets else None
        self._digest = hashlib.blake2b(digest_size=16)
        self._num_tokens = 0
        self._num_target_bounds = 0
        self.num_documents = 0

    def add(self, document: _Document) -> None:
        # The digest covers uint32 ids and the starts of documents, whatever the file's dtype; for
        # conversations also the positions of targets.
        ids, target_bounds = document.ids, document.target_bounds
        start = np.int64(self._num_tokens)
        self._digest.update(start.tobytes())
        self._digest.update(ids.tobytes())
        self._documents_file.write(start.tobytes())
        self._tokens_file.write(ids.astype(self._dtype).tobytes())
        if self._targets_file is not None and target_bounds is not None:
            places = (start + target_bounds).tobytes()
            self._digest.update(places)
            self._targets_file.write(places)
            self._num_target_bounds += len(target_bounds)
        self._num_tokens += len(ids)
        self.num_documents += 1

    def close(self) -> None:
        self._tokens_file.close()
        self._documents_file.close()
        if self._targets_file is not None:
            self._targets_file.close()

    def meta(self) -> dict[str, Any]:
        targets = (
            {} if self._targets_file is None else {"num_target_bounds": self._num_target_bounds}
        )
        return {
            "num_tokens": self._num_tokens,
            "num_documents": self.num_documents,
            **targets,
            "digest": self._digest.hexdigest(),
        }


def _open_part(folder: Path, meta: dict[str, Any], dtype: np.dtype) -> CachedTokens:
    int64 = np.dtype(np.int64)
    num_target_bounds = meta.get("num_target_bounds")
    return CachedTokens(
        tokens=_map(folder / "tokens.bin", dtype, meta["num_tokens"]),
        document_starts=_map(folder / "documents.bin", int64, meta["num_documents"]),
        target_bounds=(
            None
            if num_target_bounds is None
            else _map(folder / "targets.bin", int64, num_target_bounds)
        ),
        digest=meta["digest"],
    )


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else -1
    if size != count * dtype.itemsize:
        raise DataError(
            f"the cached file {path} has {size} bytes instead of {count * dtype.itemsize}: it was "
            f"changed after it was made. Delete {path.parent.parent} to have it made again."
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
