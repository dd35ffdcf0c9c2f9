"""The files of a corpus, in every format, and the errors for missing ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.errors import DataError
from torchtitan_lite.registry import REGISTRY, Dataset
from torchtitan_lite.schema.data import CorpusConfig

DOCUMENTS = ["first document", "second\nwith lines\n", "third ✓"]


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
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder), **settings), tmp_path / "cache")
    assert list(corpus.documents()) == DOCUMENTS
    assert [corpus.text_of(example) for example in corpus.stream()] == DOCUMENTS


def test_a_glob_a_file_and_another_column(tmp_path: Path) -> None:
    write_text(tmp_path)
    glob = open_corpus(CorpusConfig(dataset_path=f"{tmp_path}/[01].txt"), tmp_path / "cache")
    assert list(glob.documents()) == DOCUMENTS[:2]
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x", "n": 1}\n{"body": null, "n": 2}\n{"body": "", "n": 3}\n')
    corpus = open_corpus(CorpusConfig(dataset_path=str(file), text_column="body"), tmp_path / "c")
    assert list(corpus.documents()) == ["x"]
    with pytest.raises(DataError, match="column 'n' contains int"):
        wrong = CorpusConfig(dataset_path=str(file), text_column="n")
        list(open_corpus(wrong, tmp_path / "c").documents())


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = CorpusConfig(dataset_path=str(tmp_path / "*.txt"))
    before = open_corpus(config, tmp_path / "c").fingerprint
    assert open_corpus(config, tmp_path / "c").fingerprint == before
    (tmp_path / "1.txt").write_text("changed")
    assert open_corpus(config, tmp_path / "c").fingerprint != before


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_lists_existing_ones(tmp_path: Path, streaming: bool) -> None:
    write_jsonl(tmp_path)
    config = CorpusConfig(dataset_path=str(tmp_path / "data.jsonl"), text_column="body")
    corpus = open_corpus(config, tmp_path / "cache")
    with pytest.raises(DataError, match="no column 'body'; its columns are 'text'"):
        list(corpus.stream() if streaming else corpus.documents())


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
        open_corpus(CorpusConfig(**settings), tmp_path)


def test_ambiguous_and_damaged_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    write_text(tmp_path)
    with pytest.raises(DataError, match=r"extensions '.jsonl', '.txt'.*Set dataset to one of"):
        open_corpus(CorpusConfig(dataset_path=str(tmp_path)), tmp_path)
    with pytest.raises(DataError, match=r"matches no file with the extensions .parquet"):
        open_corpus(CorpusConfig(dataset="parquet", dataset_path=str(tmp_path)), tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"\n{{{')
    corpus = open_corpus(CorpusConfig(dataset_path=str(bad)), tmp_path / "cache")
    with pytest.raises(DataError, match=r"bad.jsonl:1: not JSON"):
        list(corpus.documents())


def test_the_standard_library_is_source_text(tmp_path: Path) -> None:
    corpus = open_corpus(CorpusConfig(), tmp_path)
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any(part in ("site-packages", "test") for f in corpus.files for part in f.parts)
    assert list(corpus.files) == sorted(corpus.files)


def test_a_registered_data_set_gives_the_same_texts_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["one", "two", ""]
    monkeypatch.setitem(REGISTRY.datasets, "mine", Dataset(documents=lambda: texts, version="1"))
    corpus = open_corpus(CorpusConfig(dataset="mine"), tmp_path)
    assert list(corpus.documents()) == ["one", "two"]
    assert [example["text"] for example in corpus.stream()] == texts
    monkeypatch.setitem(REGISTRY.datasets, "mine", Dataset(documents=lambda: texts, version="2"))
    assert open_corpus(CorpusConfig(dataset="mine"), tmp_path).fingerprint != corpus.fingerprint
