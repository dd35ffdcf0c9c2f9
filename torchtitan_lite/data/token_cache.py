"""A corpus as token ids in memory-mapped files, made once.

Layer: above corpus, tokenizer and atomic_folder. Invariants: what is in the cache is complete;
its name is a hash of everything that its content depends on; and no process, whatever its rank,
does anything that the others do not. One pass over the documents writes two parts: the documents
to train on, and those held out.

    CACHE/tokens/KEY/meta.json
    CACHE/tokens/KEY/{train,held_out}/tokens.bin      uint16 or uint32, one after the other
    CACHE/tokens/KEY/{train,held_out}/documents.bin   int64, where each document starts
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lite.data.atomic_folder import build_once
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.progress import progress
from torchtitan_lite.data.tokenizer import Tokenizer, TokenizerFiles, check_vocab_size
from torchtitan_lite.errors import DataError

_FORMAT = 1
_PARTS = ("train", "held_out")
_BATCH_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True)
class CachedTokens:
    """One part of a tokenised corpus."""

    tokens: np.ndarray
    document_starts: np.ndarray
    digest: str
    """Hash of the tokens: the same text and tokenizer give the same, wherever the files lie."""


@dataclass(frozen=True, kw_only=True)
class TokenisedCorpus:
    """Both parts of a tokenised corpus."""

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
) -> TokenisedCorpus:
    """The tokens of `corpus`, from the cache or made now. Every process calls this alike."""
    parts = [str(_FORMAT), corpus.fingerprint, tokenizer.fingerprint, repr(held_out_fraction)]
    key = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
    folder = cache_folder / "tokens" / key

    def build(temporary: Path) -> None:
        loaded = tokenizer.load()
        check_vocab_size(tokenizer.folder, loaded.vocab_size, vocab_size)
        _write(corpus, loaded, held_out_fraction, temporary)

    build_once(folder, f"the tokens of {corpus.name}", build)
    meta = json.loads((folder / "meta.json").read_text())
    check_vocab_size(tokenizer.folder, meta["vocab_size"], vocab_size)
    dtype = _token_dtype(meta["vocab_size"])
    train, held_out = (_open_part(folder / part, meta["parts"][part], dtype) for part in _PARTS)
    return TokenisedCorpus(name=corpus.name, train=train, held_out=held_out)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: a function of its text alone, so that
    neither its place nor its neighbours matter, and equal documents are never in both parts."""
    if fraction == 0:
        return False
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def tokenise(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Each document as uint32 ids, with the tokens that begin and end it where the tokenizer has
    them."""
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    encoded = tokenizer.encode_batch(texts)
    return [np.array(before + ids + after, dtype=np.uint32) for ids in encoded]


def _write(corpus: Corpus, tokenizer: Tokenizer, fraction: float, folder: Path) -> None:
    dtype = _token_dtype(tokenizer.vocab_size)
    with ExitStack() as opened:
        writers = {
            part: opened.enter_context(closing(_PartWriter(folder / part, dtype)))
            for part in _PARTS
        }
        advance = opened.enter_context(progress(f"tokenising {corpus.name}", "documents"))
        for texts in _batches(corpus.documents()):
            documents = tokenise(tokenizer, texts)
            for text, ids in zip(texts, documents, strict=True):
                writers["held_out" if is_held_out(text, fraction) else "train"].add(ids)
            advance(len(texts), sum(map(len, documents)))
    if not any(writer.num_documents for writer in writers.values()):
        raise DataError(
            f"the corpus {corpus.name!r} has no text in column {corpus.column!r}. Check "
            f"dataset_path and text_column."
        )
    meta = {
        "format": _FORMAT,
        "corpus": corpus.name,
        "vocab_size": tokenizer.vocab_size,
        "held_out_fraction": fraction,
        "parts": {part: writer.meta() for part, writer in writers.items()},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in batches of about `_BATCH_BYTES`, for the tokenizer's threads."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _PartWriter:
    """Writes the files of one part."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir()
        self._dtype = dtype
        self._tokens_file = (folder / "tokens.bin").open("wb")
        self._documents_file = (folder / "documents.bin").open("wb")
        self._digest = hashlib.blake2b(digest_size=16)
        self._num_tokens = 0
        self.num_documents = 0

    def add(self, ids: np.ndarray) -> None:
        # The digest is of uint32 ids and of where documents start, whatever the file's dtype.
        start = np.int64(self._num_tokens)
        self._digest.update(start.tobytes())
        self._digest.update(ids.tobytes())
        self._documents_file.write(start.tobytes())
        self._tokens_file.write(ids.astype(self._dtype).tobytes())
        self._num_tokens += len(ids)
        self.num_documents += 1

    def close(self) -> None:
        self._tokens_file.close()
        self._documents_file.close()

    def meta(self) -> dict[str, Any]:
        return {
            "num_tokens": self._num_tokens,
            "num_documents": self.num_documents,
            "digest": self._digest.hexdigest(),
        }


def _open_part(folder: Path, meta: dict[str, Any], dtype: np.dtype) -> CachedTokens:
    return CachedTokens(
        tokens=_map(folder / "tokens.bin", dtype, meta["num_tokens"]),
        document_starts=_map(folder / "documents.bin", np.dtype(np.int64), meta["num_documents"]),
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
