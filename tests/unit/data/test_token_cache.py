"""The token cache: built once, complete or absent, split in two, cheap to open again."""

import hashlib
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.ranks import FORK_SERVER
from tests.unit.conftest import Fsyncs
from torchtitan_lite.config.tables.data import CorpusConfig, DataConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import open_data, token_cache
from torchtitan_lite.data.atomic_folder import build_once
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.token_cache import TokenizedCorpus, open_token_cache
from torchtitan_lite.data.tokenizer import _texts, load_tokenizer, open_tokenizer

FIXTURE = Path(__file__).parents[2] / "assets" / "fixture.jsonl"

HEAVY = {"datasets", "tokenizers", "pyarrow", "pandas"}


def open_and_report(path: Path, tokenizer: str | None, cache: Path, end: Connection) -> None:
    """Send the digest of the tokens, and which modules of `HEAVY` were imported."""
    before = HEAVY & set(sys.modules)
    data = open_data(
        DataConfig(
            dataset_path=str(path), cache_folder=str(cache), seq_len=16, held_out_fraction=0.2
        ),
        ValidationConfig(enable=True),
        hf_assets_path=tokenizer,
        vocab_size=300,
        seed=1,
        document_mask=True,
        pin_memory=False,
    )
    data.loader.load([range(4)], step=0)
    assert not before
    end.send((data.loader.state(0)["corpora"][0]["digest"], HEAVY & set(sys.modules)))
    data.loader.close()


def start(path: Path, tokenizer: str | None, cache: Path) -> tuple[Any, Connection]:
    ours, theirs = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=open_and_report, args=(path, tokenizer, cache, theirs))
    process.start()
    theirs.close()
    return process, ours


def finish(started: tuple[Any, Connection]) -> tuple[str, set[str]]:
    process, ours = started
    reported = ours.recv()
    process.join(200)
    assert process.exitcode == 0
    return reported


def tokenized(folder: Path, cache: Path, fraction: float, path: Path = FIXTURE) -> TokenizedCorpus:
    corpus = open_corpus(CorpusConfig(dataset_path=str(path)))
    tokenizer = open_tokenizer(str(folder), [corpus], 300, cache)
    return open_token_cache(
        corpus, tokenizer, held_out_fraction=fraction, vocab_size=300, cache_folder=cache
    )


def texts_of(part, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in np.split(part.tokens, part.document_starts[1:])]


def test_documents_are_complete_and_in_order(
    tmp_path: Path, tokenizer_folder: Path, documents: list[str]
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    part = tokenized(tokenizer_folder, tmp_path, 0.0).train
    assert texts_of(part, tokenizer) == documents
    assert (part.tokens[part.document_starts] == tokenizer.bos_id).all()
    assert (part.tokens[part.document_starts[1:] - 1] == tokenizer.eos_id).all()
    assert part.tokens.dtype == np.uint16
    # Of uint32 tokens, the same in every release, because checkpoints store it.
    digest = hashlib.blake2b(digest_size=16)
    for start, ids in zip(
        part.document_starts, np.split(part.tokens, part.document_starts[1:]), strict=True
    ):
        digest.update(start.tobytes() + ids.astype(np.uint32).tobytes())
    assert part.digest == digest.hexdigest()


def test_a_cache_with_truncated_documents_is_not_used(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokenized(tokenizer_folder, tmp_path / "expected", 0.0).train.digest
    # What releases with format 1 made of a tokenizer that stores a truncation.
    monkeypatch.setattr(token_cache, "_FORMAT", 1)
    truncated = tokenized(tokenizer_folder, tmp_path, 0.0).train
    [meta] = tmp_path.glob("tokens/*/meta.json")
    meta.write_text(meta.read_text().replace(truncated.digest, "truncated"))
    monkeypatch.undo()
    assert tokenized(tokenizer_folder, tmp_path, 0.0).train.digest == expected


def test_held_out_documents_are_in_only_one_part(
    tmp_path: Path, tokenizer_folder: Path, documents: list[str]
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    both = tokenized(tokenizer_folder, tmp_path, 0.3)
    train, held_out = texts_of(both.train, tokenizer), texts_of(both.held_out, tokenizer)
    assert sorted(train + held_out) == sorted(documents)
    assert 4 <= len(held_out) <= 20
    # The split depends on the text, so that it is the same in a shuffled copy of the corpus.
    copy = tmp_path / "copy.jsonl"
    copy.write_text("\n".join(reversed(FIXTURE.read_text().splitlines())))
    again = tokenized(tokenizer_folder, tmp_path, 0.3, copy)
    assert sorted(texts_of(again.held_out, tokenizer)) == sorted(held_out)


def test_several_processes_build_once_and_a_warm_start_imports_little(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    outputs = [finish(p) for p in [start(FIXTURE, None, cache) for _ in range(3)]]
    assert len({digest for digest, _ in outputs}) == 1
    # Exactly one of the three processes had to load the libraries, for each of tokenizer and
    # tokens.
    assert 1 <= sum("tokenizers" in modules for _, modules in outputs) <= 2
    assert len([p for p in (cache / "tokens").iterdir() if p.is_dir()]) == 1
    assert len([p for p in (cache / "tokenizers").iterdir() if p.is_dir()]) == 1
    assert finish(start(FIXTURE, None, cache)) == (outputs[0][0], set())


@pytest.mark.matrix
def test_a_killed_build_leaves_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(FIXTURE.read_text() * 3000)
    cache = tmp_path / "cache"
    process, _ = start(big, str(tokenizer_folder), cache)
    deadline = time.monotonic() + 200
    written: list[Path] = []
    while not any(path.stat().st_size for path in written):
        assert process.is_alive() and time.monotonic() < deadline
        written = list(cache.glob("tokens/*.building-*/train/tokens.bin"))
        time.sleep(0.005)
    process.kill()
    process.join()
    assert [p for p in cache.glob("tokens/*") if p.is_dir() and ".building-" not in p.name] == []
    big.write_text(FIXTURE.read_text())
    assert tokenized(tokenizer_folder, cache, 0.2, big).train.tokens.size > 1000


def test_leftovers_of_a_dead_builder_are_removed(tmp_path: Path) -> None:
    left_over = tmp_path / "thing.building-1"
    left_over.mkdir()
    (left_over / "half").write_text("torn")

    def fail(folder: Path) -> None:
        (folder / "half").write_text("torn")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        build_once(tmp_path / "thing", "a thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    build_once(tmp_path / "thing", "a thing", lambda folder: (folder / "whole").touch())
    build_once(tmp_path / "thing", "a thing", fail)
    assert (tmp_path / "thing" / "whole").is_file()


def test_a_folder_is_durable_once_it_has_its_name(tmp_path: Path, fsyncs: Fsyncs) -> None:
    def build(folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_bytes(b"content")

    build_once(tmp_path / "thing", "a thing", build)
    parent = fsyncs.synced.pop(tmp_path)
    (folder,) = (path for path in fsyncs.synced if path.parent == tmp_path)
    assert "thing" in parent and folder.name not in parent
    part = folder / "part"
    assert fsyncs.synced == {folder: {"part"}, part: {"file"}, part / "file": b"content"}


def test_a_damaged_or_unwritable_cache_is_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenized(tokenizer_folder, tmp_path, 0.0)
    [file] = tmp_path.glob("tokens/*/train/tokens.bin")
    with file.open("ab") as end:
        end.write(b"x")
    with pytest.raises(DataError, match="was changed after it was made. Delete"):
        tokenized(tokenizer_folder, tmp_path, 0.0)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"set training.cache_folder"):
        tokenized(tokenizer_folder, tmp_path / "file", 0.0)


def test_a_corpus_without_text_is_rejected(tmp_path: Path, tokenizer_folder: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(DataError, match="no text in column 'text'"):
        tokenized(tokenizer_folder, tmp_path, 0.0, empty)


def test_rows_without_text_are_reported_at_every_start(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "x"}\n{"text": ""}\n{"text": null}\n{}\n')

    def open_with(fraction: float) -> None:
        corpus = open_corpus(CorpusConfig(dataset_path=str(path), max_unusable_fraction=fraction))
        files = open_tokenizer(str(tokenizer_folder), [corpus], 300, tmp_path)
        open_token_cache(
            corpus, files, held_out_fraction=0.0, vocab_size=300, cache_folder=tmp_path
        )

    for _ in range(2):
        caplog.clear()
        open_with(0.5)
        assert f"2 of 4 rows cannot be used and are left out; the first is {path}:3" in caplog.text
        assert "1 of 4 rows are empty" in caplog.text
    # A cache that was made with a higher limit does not hide them.
    with pytest.raises(DataError, match="2 of 4 rows .* have no usable text"):
        open_with(0.4)


@pytest.mark.parametrize("warm", [False, True])
def test_a_tokenizer_larger_than_the_model(
    tmp_path: Path, tokenizer_folder: Path, warm: bool
) -> None:
    corpus = open_corpus(CorpusConfig(dataset_path=str(FIXTURE)))
    tokenizer = open_tokenizer(str(tokenizer_folder), [corpus], 300, tmp_path)
    settings = {"held_out_fraction": 0.0, "cache_folder": tmp_path}
    if warm:
        open_token_cache(corpus, tokenizer, vocab_size=300, **settings)
    with pytest.raises(DataError, match="has 300 tokens, but the model's vocabulary is 299"):
        open_token_cache(corpus, tokenizer, vocab_size=299, **settings)
    # It is noticed before anything is tokenized.
    assert len(list(tmp_path.glob("tokens/*/meta.json"))) == warm


def test_a_corpus_with_too_many_unusable_rows_is_neither_cached_nor_trained_on(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "x"}\n{"text": null}\n')
    corpus = open_corpus(CorpusConfig(dataset_path=str(path), max_unusable_fraction=0.4))
    files = open_tokenizer(str(tokenizer_folder), [corpus], 300, tmp_path)
    with pytest.raises(DataError, match="1 of 2 rows .* have no usable text"):
        open_token_cache(
            corpus, files, held_out_fraction=0.0, vocab_size=300, cache_folder=tmp_path
        )
    assert not list(tmp_path.glob("tokens/*/meta.json"))
    with pytest.raises(DataError, match="1 of 2 rows .* have no usable text"):
        list(_texts(corpus))
