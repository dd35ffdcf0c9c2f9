"""The files of a corpus, in every format, and the errors for missing ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.documents import read_documents
from torchtitan_lite.data.unusable_rows import UnusableRows
from torchtitan_lite.errors import DataError
from torchtitan_lite.registry import REGISTRY, Dataset
from torchtitan_lite.schema.data import CorpusConfig

DOCUMENTS = ["first document", "second\nwith lines\n", "third ✓"]


def texts(corpus: Corpus) -> list[str]:
    unusable = UnusableRows(corpus)
    read = list(read_documents(corpus, unusable))
    unusable.check()
    return read


def write_json(folder: Path) -> None:
    (folder / "data.json").write_text(json.dumps([{"text": text} for text in DOCUMENTS]))


def write_jsonl(folder: Path) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in DOCUMENTS))


def write_parquet(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": DOCUMENTS}).to_parquet(str(folder / "data.parquet"))


def write_arrow(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(folder))


def write_text(folder: Path) -> None:
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text)


WRITERS: dict[str, Callable[[Path], None]] = {
    "json": write_json,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "text": write_text,
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "inferred"])
@pytest.mark.parametrize("format", WRITERS)
def test_formats(tmp_path: Path, format: str, named: bool) -> None:
    folder = tmp_path / "data [1]"
    folder.mkdir()
    WRITERS[format](folder)
    settings: dict[str, Any] = {"dataset": format} if named else {}
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder), **settings))
    assert texts(corpus) == DOCUMENTS


def test_a_glob_a_file_and_another_column(tmp_path: Path) -> None:
    write_text(tmp_path)
    glob = open_corpus(CorpusConfig(dataset_path=f"{tmp_path}/[01].txt"))
    assert texts(glob) == DOCUMENTS[:2]
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x", "n": 1}\n{"body": "", "n": 3}\n')
    corpus = open_corpus(CorpusConfig(dataset_path=str(file), text_column="body"))
    assert texts(corpus) == ["x"]
    with pytest.raises(DataError, match="'n' is a number, not a text"):
        wrong = CorpusConfig(dataset_path=str(file), text_column="n")
        texts(open_corpus(wrong))


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = CorpusConfig(dataset_path=str(tmp_path / "*.txt"))
    before = open_corpus(config).fingerprint
    assert open_corpus(config).fingerprint == before
    (tmp_path / "1.txt").write_text("changed")
    assert open_corpus(config).fingerprint != before


def test_a_missing_column_lists_existing_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    config = CorpusConfig(dataset_path=str(tmp_path / "data.jsonl"), text_column="body")
    corpus = open_corpus(config)
    with pytest.raises(DataError, match="has no 'body'; its columns are 'text'.* set text_column"):
        texts(corpus)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_path": "/no/such.jsonl"}, r"/no/such.jsonl.* matches no file"),
        ({"dataset": "json"}, "needs dataset_path"),
        ({"dataset": "c4_test"}, "python_stdlib"),
        ({"dataset": "someone/something", "dataset_path": "x"}, "Leave dataset out"),
        ({"dataset": "someone/no_such_data"}, "cannot read the corpus 'someone/no_such_data'"),
        ({"dataset": "c4"}, "cannot read the corpus 'c4'"),
    ],
)
def test_missing_files(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_corpus(CorpusConfig(**settings))


def test_ambiguous_and_damaged_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    write_text(tmp_path)
    with pytest.raises(DataError, match=r"extensions '.jsonl', '.txt'.*Set dataset to one of"):
        open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    with pytest.raises(DataError, match=r"matches no file with the extensions .parquet"):
        open_corpus(CorpusConfig(dataset="parquet", dataset_path=str(tmp_path)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"\n{{{')
    corpus = open_corpus(CorpusConfig(dataset_path=str(bad)))
    with pytest.raises(DataError, match=r"bad.jsonl:1: not JSON"):
        texts(corpus)


def test_the_standard_library_is_source_text(tmp_path: Path) -> None:
    corpus = open_corpus(CorpusConfig())
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any(part in ("site-packages", "test") for f in corpus.files for part in f.parts)
    assert list(corpus.files) == sorted(corpus.files)


def test_a_registered_data_set_gives_the_same_texts_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ["one", "two", ""]
    monkeypatch.setitem(REGISTRY.datasets, "mine", Dataset(documents=lambda: values, version="1"))
    corpus = open_corpus(CorpusConfig(dataset="mine"))
    assert texts(corpus) == ["one", "two"]
    rows, state = corpus.rows(["text"])
    assert next(rows).values == {"text": "one"}
    assert [row.values["text"] for row in corpus.rows(["text"], state()).rows] == ["two", ""]
    monkeypatch.setitem(REGISTRY.datasets, "mine", Dataset(documents=lambda: values, version="2"))
    assert open_corpus(CorpusConfig(dataset="mine")).fingerprint != corpus.fingerprint
