"""The files of a corpus, in every format, and the errors for missing ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.registry import REGISTRY, Dataset
from torchtitan_lite.data import corpus as corpus_module
from torchtitan_lite.data import opening
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.documents import read_documents
from torchtitan_lite.data.unusable_rows import UnusableRows

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


ROW = '{"text": "%s"}\n'
BESIDE_DATA = [
    *("README.md", "LICENSE.txt", ".gitattributes", "._b.jsonl", ".ipynb_checkpoints/b.jsonl"),
    *(".cache/huggingface/b.jsonl", "__MACOSX/b.jsonl", "dataset_infos.json", "__pycache__/b.json"),
]


@pytest.mark.parametrize("beside", BESIDE_DATA)
def test_what_a_folder_holds_beside_its_data_is_not_read(tmp_path: Path, beside: str) -> None:
    (tmp_path / "a.jsonl").write_text(ROW % "x")
    (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside).write_bytes(b"\x00\x05\x16\x07 no data")
    assert texts(open_corpus(CorpusConfig(dataset_path=str(tmp_path)))) == ["x"]


def test_a_link_to_a_missing_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW % "x")
    (tmp_path / "b.jsonl").symlink_to("gone")
    with pytest.raises(DataError, match=r"b.jsonl: a link to gone, which does not exist"):
        open_corpus(CorpusConfig(dataset_path=str(tmp_path)))


def test_documents_may_have_the_names_of_metadata(tmp_path: Path) -> None:
    for name in ("README.md", "a.md", "LICENSE.txt"):
        (tmp_path / name).write_text(name)
    corpus = open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    assert texts(corpus) == ["LICENSE.txt", "README.md", "a.md"]


@pytest.mark.parametrize("path", ["", "/*.json"], ids=["folder", "glob"])
def test_data_may_be_named_like_the_state_of_a_data_set(tmp_path: Path, path: str) -> None:
    for name in ("city", "country", "state"):
        (tmp_path / f"{name}.json").write_text(ROW % name)
    corpus = open_corpus(CorpusConfig(dataset_path=f"{tmp_path}{path}"))
    assert texts(corpus) == ["city", "country", "state"]


def test_a_glob_reads_files_with_the_names_of_metadata(tmp_path: Path) -> None:
    for name in ("a", "dataset_info"):
        (tmp_path / f"{name}.json").write_text(ROW % name)
    assert texts(open_corpus(CorpusConfig(dataset_path=f"{tmp_path}/*"))) == ["a", "dataset_info"]


def test_metadata_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.json", "state.json", "dataset_info.json", "README.md"):
        (tmp_path / name).write_text(ROW % name)
    with caplog.at_level("INFO", "torchtitan_lite"):
        assert texts(open_corpus(CorpusConfig(dataset_path=str(tmp_path)))) == ["a.json"]
    assert "is not read: dataset_info.json, state.json, README.md" in caplog.text


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    splits = datasets.DatasetDict()
    for name in ("train", "test"):
        splits[name] = datasets.Dataset.from_dict({"text": [name]})
    splits.save_to_disk(str(tmp_path))
    # What `map` leaves there.
    datasets.load_from_disk(str(tmp_path / "train")).map(lambda row: {"text": row["text"] + "!"})
    assert list(tmp_path.glob("train/cache-*.arrow"))
    assert texts(open_corpus(CorpusConfig(dataset_path=str(tmp_path / "train")))) == ["train"]
    assert texts(open_corpus(CorpusConfig(dataset_path=str(tmp_path)))) == ["train"]


@pytest.mark.parametrize(
    "names",
    [
        {"train.jsonl": "train", "test_1.jsonl": "test", "evaluation/a.jsonl": "test"},
        {"train/a.jsonl": "train", "dev/a.jsonl": "validation"},
        {
            "data/train-00000-of-00001.json": "train",
            "data/validation-00000-of-00001.json": "validation",
            "README.md": "card",
        },
        {
            "en/c4-train.00000-of-01024.json": "train",
            "en/c4-validation.00000-of-00008.json": "validation",
        },
        {"wiki-train-00000-of-00001-0a1b.jsonl": "train", "wiki-test.jsonl": "test"},
        {"dev/train.jsonl": "train", "dev/test.jsonl": "test"},
        {"train/test-plan.jsonl": "train", "test/training-guide.jsonl": "test"},
    ],
)
def test_a_folder_with_several_splits_is_read_by_split(
    tmp_path: Path, names: dict[str, str]
) -> None:
    for name, text in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ROW % text)
    path: dict[str, Any] = {"dataset_path": str(tmp_path)}
    for split in {*names.values()} & {"train", "validation", "test"}:
        chosen = texts(open_corpus(CorpusConfig(**path, dataset_split=split)))
        assert chosen == [text for text in names.values() if text == split]
    everything = CorpusConfig(dataset_path=f"{tmp_path}/**/*.json*")
    assert len(texts(open_corpus(everything))) == len(names) - ("README.md" in names)
    with pytest.raises(DataError, match=r'of the splits .*but dataset_split = "all"'):
        open_corpus(CorpusConfig(**path, dataset_split="all"))


def test_names_that_only_look_like_splits_are_read(tmp_path: Path) -> None:
    for name in ("train.jsonl", "trainer.jsonl", "contest.jsonl", "latest.jsonl", "value.jsonl"):
        (tmp_path / name).write_text(ROW % name)
    assert len(texts(open_corpus(CorpusConfig(dataset_path=str(tmp_path))))) == 5


@pytest.mark.parametrize(
    "names",
    [
        ["training-guide.md", "testing-guide.md", "intro.md", "chapter1.md"],
        ["intro.md", "dev-guide.md", "test-plan.md"],
        ["train/a.txt", "test/a.txt"],
        ["my_train_file.jsonl", "my_eval_file.jsonl"],
        ["intro.jsonl", "dev-guide.jsonl", "test-plan.jsonl"],
        ["train.jsonl", "test-plan.jsonl"],
    ],
)
def test_words_of_splits_in_other_names_exclude_nothing(
    tmp_path: Path, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ROW % name)
    corpus = open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    assert len(texts(corpus)) == len(names)
    is_reported = f"but all {len(names)} files are read: dataset_split applies" in caplog.text
    assert is_reported == (corpus.format == "json" or "train/a.txt" in names)


def test_files_without_a_split_beside_others_are_refused(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(ROW % name)
    with pytest.raises(DataError, match=r"splits test, train, and other.jsonl, whose name has non"):
        open_corpus(CorpusConfig(dataset_path=str(tmp_path)))


def test_shards_are_of_splits_with_further_names(tmp_path: Path) -> None:
    for name in ("train_sft", "train_gen", "test_sft"):
        (tmp_path / f"{name}-00000-of-00001.jsonl").write_text(ROW % name)
    corpus = CorpusConfig(dataset_path=str(tmp_path), dataset_split="train_sft")
    assert texts(open_corpus(corpus)) == ["train_sft"]
    with pytest.raises(DataError, match=r'splits test_sft, .* but dataset_split = "train"'):
        open_corpus(CorpusConfig(dataset_path=str(tmp_path)))


def test_configurations_of_a_data_card_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "en.jsonl").write_text(ROW % "x")
    (tmp_path / "README.md").write_text("---\nlicense: mit\nconfigs:\n- config_name: en\n---\n")
    open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    assert "README.md defines configurations, which are not read" in caplog.text
    caplog.clear()
    (tmp_path / "README.md").write_text("# Data\nNo configs: here\n")
    open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    assert "configurations" not in caplog.text


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


def test_rows_of_the_hub_are_counted_from_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    stream = datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    (tmp_path / "a.txt").write_text("a")
    local = open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    corpus = replace(local, name="hub", hub_name="hub", streaming=True)
    rows = corpus.rows(["text"])
    assert [next(rows.rows).place for _ in "ab"] == ["hub, row 1", "hub, row 2"]
    resumed = corpus.rows(["text"], rows.state())
    assert [row.place for row in resumed.rows] == ["hub, row 1 since the resume"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub_without_the_column_is_named(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    rows = datasets.Dataset.from_dict({"content": ["a"]})
    given = rows.to_iterable_dataset() if streaming else rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: given)
    monkeypatch.setattr(corpus_module, "_fingerprint_on_hub", lambda *_: "1f")
    corpus = open_corpus(CorpusConfig(dataset="some/data", streaming=streaming))
    with pytest.raises(DataError, match="has no column 'text'; its columns are 'content'"):
        corpus.rows(["text"])


def test_a_file_that_is_empty_when_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.touch()
    corpus = open_corpus(CorpusConfig(dataset_path=str(path)))
    with pytest.raises(DataError, match="some.jsonl is empty"):
        next(corpus.rows(["text"]).rows)


def test_a_streamed_corpus_needs_a_tokenizer_that_fits_the_model(tmp_path: Path) -> None:
    files = SimpleNamespace(folder=tmp_path, load=lambda: SimpleNamespace(vocab_size=10))
    opener: Any = SimpleNamespace(tokenizer=files, vocab_size=9)
    unused: Any = None
    with pytest.raises(DataError, match="has 10 tokens, but the model's vocabulary is 9"):
        opening._Opener.stream(opener, unused, unused, unused)
