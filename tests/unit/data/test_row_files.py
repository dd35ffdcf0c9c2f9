"""Unreadable data files: one line with the file, the line number and the remedy."""

import gzip
import io
import time
import tracemalloc
import zipfile
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import row_files
from torchtitan_lite.data.conversations import read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.documents import read_documents
from torchtitan_lite.data.stream_reader import BEGINNING, StreamReader
from torchtitan_lite.data.tokenization import DocumentTokenizer
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.unusable_rows import UnusableRows

GOOD = b'{"text": "one"}\n{"text": "two"}\n'
HUGE = b'{"text": "x", "n": 1' + b"0" * 5000 + b"}"
TOO_MANY_DIGITS = "an integer has more than 4300 digits, the limit of Python."
GZIP = gzip.compress(GOOD)
CONVERT = "Convert the file, for example by iconv -f LATIN1 -t UTF-8."


def zipped(*names: str, encrypted: bool = False) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, GOOD)
    if encrypted:
        # The flags of the entry in the directory at the end.
        content.getbuffer()[content.getvalue().rindex(b"PK\x01\x02") + 8] |= 1
    return content.getvalue()


ZIP = zipped("a.jsonl")
CASES: dict[str, tuple[dict[str, bytes], str]] = {
    "empty": (
        {"a.jsonl": b""},
        'dataset_path = "DIR": DIR/a.jsonl is empty (0 bytes), but a corpus needs at least one '
        "document. Write documents to it, or set dataset_path to another file.",
    ),
    "all empty": (
        {"a.jsonl": b"", "b.jsonl": b""},
        'dataset_path = "DIR": all 2 files are empty (0 bytes), but a corpus needs at least one '
        "document. Write documents to it, or set dataset_path to another file.",
    ),
    "a line that is not JSON": (
        {"a.jsonl": GOOD, "b.jsonl": GOOD + b"oops\n" + GOOD},
        "DIR/b.jsonl:3: not JSON (Expecting value, column 1), and each line must be one JSON "
        "object. Correct the line or remove it.",
    ),
    "a truncated line": (
        {"a.jsonl": GOOD + b'{"text": "thr'},
        "DIR/a.jsonl:3: not JSON (Unterminated string starting at, column 10), and each line must "
        "be one JSON object. Correct the line or remove it.",
    ),
    "a list that is not JSON": (
        {"a.json": b'[{"text": "one"},\n {"text": }]'},
        "DIR/a.json:2: not JSON (Expecting value, column 11), and the file must be a list of JSON "
        "objects, or one object per line. Correct it.",
    ),
    "a line that is not an object": (
        {"a.jsonl": GOOD + b"3\n"},
        "DIR/a.jsonl:3: not a JSON object but a number, and each row must be one. Correct it or "
        "remove it.",
    ),
    "a first line that is not an object": (
        {"a.jsonl": b"3\n" + GOOD},
        "DIR/a.jsonl:1: not a JSON object but a number, and each row must be one. Correct it or "
        "remove it.",
    ),
    "Latin 1 in JSON": (
        {"a.jsonl": GOOD + b'{"text": "caf\xe9"}\n'},
        "DIR/a.jsonl:3: not UTF-8 (byte 0xe9 in column 14), and data files must be. " + CONVERT,
    ),
    "Latin 1 in text": (
        {"a.txt": b"one\ncaf\xe9 au lait"},
        "DIR/a.txt:2: not UTF-8 (byte 0xe9 in column 4), and data files must be. " + CONVERT,
    ),
    "UTF-16 in text": (
        {"a.txt": "one".encode("utf-16")},
        "DIR/a.txt:1: not UTF-8 (byte 0xff in column 1), and data files must be. "
        + CONVERT.replace("LATIN1", "UTF-16"),
    ),
    "an integer of 5000 digits": (
        {"a.jsonl": HUGE + b"\noops\n"},
        f"DIR/a.jsonl:1: {TOO_MANY_DIGITS} Correct the line or remove it.",
    ),
    "an integer of 5000 digits in a list": (
        {"a.json": b"[" + HUGE + b"]"},
        f"DIR/a.json: {TOO_MANY_DIGITS} Correct it.",
    ),
    "not xz": (
        {"a.jsonl.xz": GOOD},
        "DIR/a.jsonl.xz: not a .xz file that can be decompressed (Input format not supported by "
        "decoder). Replace it, or exclude it from dataset_path.",
    ),
    "not gzip": (
        {"a.jsonl.gz": GOOD},
        "DIR/a.jsonl.gz: not a .gz file that can be decompressed (Not a gzipped file (b'{\"')). "
        "Replace it, or exclude it from dataset_path.",
    ),
    "damaged gzip": (
        {"a.jsonl.gz": GZIP[:10] + b"\xff" * 10 + GZIP[20:]},
        "DIR/a.jsonl.gz: not a .gz file that can be decompressed (Error -3 while decompressing "
        "data: invalid block type). Replace it, or exclude it from dataset_path.",
    ),
    "a truncated gzip file": (
        {"a.txt.gz": GZIP[:-12]},
        "DIR/a.txt.gz: not a .gz file that can be decompressed (Compressed file ended before the "
        "end-of-stream marker was reached). Replace it, or exclude it from dataset_path.",
    ),
    "not bz2": (
        {"a.txt.bz2": GOOD},
        "DIR/a.txt.bz2: not a .bz2 file that can be decompressed (Invalid data stream). Replace "
        "it, or exclude it from dataset_path.",
    ),
    "not zip": (
        {"a.jsonl.zip": GOOD},
        "DIR/a.jsonl.zip: not a .zip file that can be decompressed (File is not a zip file). "
        "Replace it, or exclude it from dataset_path.",
    ),
    "damaged zip": (
        {"a.jsonl.zip": ZIP[:37] + b"\xff" * 4 + ZIP[41:]},
        "DIR/a.jsonl.zip: not a .zip file that can be decompressed (Error -3 while decompressing "
        "data: invalid block type). Replace it, or exclude it from dataset_path.",
    ),
    "zip of two files": (
        {"a.jsonl.zip": zipped("1.jsonl", "2.jsonl")},
        "DIR/a.jsonl.zip: an archive of 2 files (1.jsonl, 2.jsonl), and it must be of one. Extract "
        "it, and set dataset_path to the folder.",
    ),
    "zip of no file": (
        {"a.jsonl.zip": zipped()},
        "DIR/a.jsonl.zip: an archive of 0 files, and it must be of one. Extract it, and set "
        "dataset_path to the folder.",
    ),
    "encrypted zip": (
        {"a.jsonl.zip": zipped("a.jsonl", encrypted=True)},
        "DIR/a.jsonl.zip: encrypted. Extract it, and set dataset_path to the folder.",
    ),
    "a pointer of Git LFS": (
        {"a.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"},
        "DIR/a.txt: not the data but a pointer to it, of Git LFS. Run git lfs pull in that "
        "repository, or download the file.",
    ),
    "nested too deeply": (
        {"a.jsonl": b'{"text": "x", "n": ' + b"[" * 10**6},
        "DIR/a.jsonl:1: JSON that is nested too deeply. Correct the line or remove it.",
    ),
    "not Parquet": (
        {"a.parquet": b"none"},
        "DIR/a.parquet: not a Parquet file that can be read (Parquet file size is 4 bytes, smaller "
        "than the minimum file footer (8 bytes)). Replace it, or exclude it from dataset_path.",
    ),
}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path, **settings: Any) -> list[str]:
    """Return the texts of a folder, or of a file."""
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder), **settings))
    unusable = UnusableRows(corpus)
    texts = list(read_documents(corpus, unusable))
    unusable.check()
    return texts


def read_stream(folder: Path, tokenizer_folder: Path, **settings: Any) -> list[str]:
    """Return the texts of the first epoch of a stream."""
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder), streaming=True, **settings))
    tokenizer = load_tokenizer(tokenizer_folder)
    runs = StreamReader(corpus, DocumentTokenizer(tokenizer)).runs(BEGINNING)
    texts = []
    for run in takewhile(lambda run: run.origin.epoch == 0, runs):
        starts = run.document_starts - run.origin.position
        texts += [tokenizer.decode(ids.tolist()) for ids in np.split(run.tokens, starts[1:])]
    return texts


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_one_line_names_the_file_and_the_remedy(
    case: str,
    streaming: bool,
    tokenizer_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    files, expected = CASES[case]
    folder = write(tmp_path / "data", files)
    with pytest.raises(DataError) as raised:
        read_stream(folder, tokenizer_folder) if streaming else read(folder)
    assert str(raised.value).replace(str(folder), "DIR") == expected
    assert "Failed to" not in capfd.readouterr().err


def parquet(columns: dict[str, list[Any]], **types: pyarrow.DataType) -> bytes:
    table = pyarrow.table(
        {name: pyarrow.array(values, types.get(name)) for name, values in columns.items()}
    )
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content)
    return content.getvalue()


MARK = b"\xef\xbb\xbf"
READABLE: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "one of two is empty": ({"a.jsonl": b"", "b.jsonl": GOOD}, ["one", "two"]),
    "byte order mark": ({"a.jsonl": MARK + GOOD}, ["one", "two"]),
    "byte order mark in text": ({"a.txt": MARK + b"one"}, ["one"]),
    "blank lines": ({"a.jsonl": b"\n" + GOOD + b"\n \n"}, ["one", "two"]),
    "one object over lines": ({"a.json": b'{\n "text": "one"\n}\n'}, ["one"]),
    "objects over lines": ({"a.json": b'{\n"text": "one"}\n{\n"text": "two"}'}, ["one", "two"]),
    "objects over lines behind one": (
        {"a.json": b'{"text": "one"} {\n"text": "two"}'},
        ["one", "two"],
    ),
    "two objects in a line": ({"a.jsonl": GOOD[:-1] + GOOD}, ["one", "two", "one", "two"]),
    "carriage returns": ({"a.jsonl": GOOD.replace(b"\n", b"\r")}, ["one", "two"]),
    "Windows line breaks": ({"a.jsonl": GOOD.replace(b"\n", b"\r\n")}, ["one", "two"]),
    "a list of texts": ({"a.json": b'["one", "two"]'}, ["one", "two"]),
    "a tab in a text": ({"a.jsonl": b'{"text": "one\ttwo"}\n'}, ["one\ttwo"]),
    "blank lines beside good ones": (
        {"a.jsonl": GOOD, "b.jsonl": b"\n\n", "c.jsonl": b""},
        ["one", "two"],
    ),
    "upper case": ({"a.JSONL.GZ": GZIP}, ["one", "two"]),
    "gzip in parts": ({"a.jsonl.gz": GZIP + GZIP}, ["one", "two"] * 2),
    "zip of a Mac": ({"a.jsonl.zip": zipped("d/", "d/a", "__MACOSX/d/._a")}, ["one", "two"]),
    "a long line": ({"a.jsonl": b'{"text": "%s"}' % (b"x" * 300_000)}, ["x" * 300_000]),
    "control characters": ({"a.jsonl": b'{"text": "a\\u0000b\\ufeff"}'}, ["a\x00b\ufeff"]),
    "a Spark folder": (
        {"part-00000-c000.snappy.parquet": parquet({"text": ["x"]}), "_SUCCESS": b""},
        ["x"],
    ),
    "many empty texts": ({"a.jsonl": b'{"text": ""}\n' * 9 + b'{"text": "x"}'}, ["x"]),
    "NaN": ({"a.jsonl": b'{"text": "one", "score": NaN}\n'}, ["one"]),
    "a line separator in a text": ({"a.jsonl": '{"text": "a\u2028b"}'.encode()}, ["a\u2028b"]),
    "texts like timestamps": (
        {"a.jsonl": b'{"text": "2020-01-01 00:00:00"}\n{"text": "2021-01-01T00:00:00Z"}\n'},
        ["2020-01-01 00:00:00", "2021-01-01T00:00:00Z"],
    ),
    "texts like numbers": ({"a.jsonl": b'{"text": "007"}\n{"text": "1e5"}\n'}, ["007", "1e5"]),
    "other keys in a later file": (
        {"a.jsonl": GOOD, "b.jsonl": b'{"url": "y", "text": "x"}\n'},
        ["one", "two", "x"],
    ),
    "another type of an unused key": (
        {"a.jsonl": b'{"text": "x", "id": 1}\n{"text": "y", "id": "b", "m": {"a": 1}}\n'},
        ["x", "y"],
    ),
    "an unused key is repeated": ({"a.jsonl": b'{"text": "x", "id": 1, "id": 2}\n'}, ["x"]),
    "the same text twice": ({"a.jsonl": b'{"text": "x", "text": "x"}\n'}, ["x"]),
    "a surrogate pair": ({"a.jsonl": b'{"text": "\\ud83d\\ude00"}\n'}, ["\U0001f600"]),
    "an unused surrogate": ({"a.jsonl": b'{"text": "x", "id": "\\ud83d"}\n'}, ["x"]),
    "Parquet of 0 rows": (
        {"a.parquet": parquet({"text": []}), "b.parquet": parquet({"text": ["x"]})},
        ["x"],
    ),
    "Parquet without rows or text": (
        {"a.parquet": parquet({}), "b.parquet": parquet({"text": ["x"]})},
        ["x"],
    ),
    "Parquet with other columns": (
        {
            "a.parquet": parquet({"text": ["x"], "id": [1]}),
            "b.parquet": parquet({"url": ["u"], "id": ["two"], "text": ["y"]}),
        },
        ["x", "y"],
    ),
    "Parquet with other text types": (
        {
            "a.parquet": parquet({"text": ["x"]}, text=pyarrow.large_string()),
            "b.parquet": parquet(
                {"text": ["y", "y"]}, text=pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
            ),
            "c.parquet": parquet({"text": ["z"]}, text=pyarrow.string_view()),
        },
        ["x", "y", "y", "z"],
    ),
}


@pytest.mark.parametrize("case", READABLE)
def test_harmless_files_are_read(case: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    files, expected = READABLE[case]
    folder = write(tmp_path / "data", files)
    assert read(folder) == expected
    assert read_stream(folder, tokenizer_folder) == expected


def test_objects_over_lines_take_linear_time(tmp_path: Path) -> None:
    # 4 MB; copying the rest of the text at each object took 26 s.
    (tmp_path / "a.json").write_bytes(b'{\n"text": "one"\n}\n' * 200_000)
    start = time.process_time()
    assert len(read(tmp_path)) == 200_000
    assert time.process_time() - start < 4


def test_a_damaged_first_line_does_not_read_the_file_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_MAX_FIRST_OBJECT_BYTES", 100)
    file = tmp_path / "a.jsonl"
    for damaged in (b'{"text": "x"\n', b'{"text": "caf\xe9"}\n'):
        file.write_bytes(damaged + b'{"text": "%s"}\n' % (b"x" * 1000) * 5_000)
        rows = row_files.read_rows([file], "json", ["text"])
        tracemalloc.start()
        _, row = next(rows)
        num_following = sum(1 for _ in rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert row.place == f"{file}:1" and row.damage.startswith("not ")
        assert num_following == 5_000 and peak_bytes < 2e6


@pytest.mark.parametrize("refuse", ["corpus", "rows", "pointer"])
def test_files_that_cannot_be_read_are_named(refuse: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD)
    corpus = open_corpus(CorpusConfig(dataset_path=str(tmp_path)))
    file.unlink()
    with pytest.raises(DataError, match=r"a.jsonl: cannot be read: No such file or directory.$"):
        if refuse == "pointer":
            row_files.refuse_pointer(file)
        elif refuse == "rows":
            next(row_files.read_rows([file], "json", ["text"]))
        else:
            next(corpus.rows(["text"]).rows)


def test_text_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n ")
    assert read(tmp_path) == ["one\r\ntwo\n "]


def test_zstandard(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as stream:
        stream.write(GOOD)
    assert read(tmp_path) == ["one", "two"]


def test_rows_are_read_from_any_position(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % number for number in range(7)]
    files = {"a.jsonl": b"\n".join(lines[:3]), "b.jsonl": b"", "c.json": b"".join(lines[3:])}
    folder = write(tmp_path / "data", files)
    corpus = open_corpus(CorpusConfig(dataset="json", dataset_path=str(folder)))
    for count in range(8):
        rows, state = corpus.rows(["text"])
        before = [row.values["text"] for row in islice(rows, count)]
        after = [row.values["text"] for row in corpus.rows(["text"], state()).rows]
        assert before + after == [str(number) for number in range(7)]
        assert len(before) == count


@pytest.mark.parametrize(
    "state",
    [
        # As `datasets` gave them to earlier releases, for files of two rows.
        {
            "examples_iterable": {
                "examples_iterable": {"shard_idx": 2, "shard_example_idx": 2},
                "previous_state": {"shard_idx": 1, "shard_example_idx": 1},
                "num_chunks_since_previous_state": 2,
                "type": "RebatchedArrowExamplesIterable",
            },
            "epoch": 0,
        },
        {"examples_iterable": {"shard_idx": 2, "shard_example_idx": 1}, "epoch": 0},
    ],
)
def test_positions_of_earlier_releases_are_read(state: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {f"{name}.jsonl": GOOD for name in "abcd"})
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder)))
    rows = [row.place.rpartition("/")[2] for row in corpus.rows(["text"], state).rows]
    assert rows == ["c.jsonl:2", "d.jsonl:1", "d.jsonl:2"]


UNUSABLE = {
    "null": (b'{"text": null}', "'text' is null, not a text"),
    "no such key": (b'{"body": "x"}', "it has no 'text'; its columns are 'body'"),
    "no keys": (b"{}", "it has no 'text'; its columns are none"),
    "a number": (b'{"text": 3}', "'text' is a number, not a text"),
    "NaN": (b'{"text": NaN}', "'text' is a number, not a text"),
    "a list": (b'{"text": ["x"]}', "'text' is a list, not a text"),
    "a repeated key": (
        b'{"text": "x", "text": "y"}',
        "'text' is given several times, with different values",
    ),
    "an unpaired surrogate": (
        b'{"text": "x\\ud83d"}',
        "'text' contains an unpaired surrogate, which is no character",
    ),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize("case", UNUSABLE)
def test_rows_without_text_are_counted_and_limited(
    case: str, streaming: bool, tokenizer_folder: Path, tmp_path: Path
) -> None:
    row, why = UNUSABLE[case]
    folder = write(tmp_path / "data", {"a.jsonl": GOOD, "b.jsonl": GOOD + row + b"\n" + GOOD})
    expected = ["one", "two"] * 3

    def texts(**settings: Any) -> list[str]:
        if streaming:
            return read_stream(folder, tokenizer_folder, **settings)
        return read(folder, **settings)

    assert texts(max_unusable_fraction=0.15) == expected
    with pytest.raises(DataError) as raised:
        texts()
    assert (
        str(raised.value)
        .replace(str(folder), "DIR")
        .startswith(
            f"1 of 7 rows of DIR have no usable text; the first is DIR/b.jsonl:3: {why}. Correct"
        )
    )
    assert str(raised.value).endswith("or allow them by max_unusable_fraction (now 0.01).")


def test_a_stream_without_text_ends_before_its_end(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Half of the rows have no text; a stream may have no end."""
    rows = b'{"text": "x"}\n{"text": null}\n' * 5_000
    folder = write(tmp_path / "data", {"a.jsonl": rows})
    with pytest.raises(DataError, match=r"112 of 224 rows of .* have no usable text"):
        read_stream(folder, tokenizer_folder)


FIRST = "1 of 32 rows cannot be used and are left out; the first is DIR/a.jsonl:1: 'text' is null, "


@pytest.mark.parametrize(
    ("bad_at", "expected"),
    [([0], [FIRST]), ([0, 40], [FIRST, "2 of 50 rows cannot be used and are left out"])],
)
def test_a_stream_names_its_first_problem_once_and_on_rank_0(
    bad_at: list[int],
    expected: list[str],
    tokenizer_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [b'{"text": null}' if row in bad_at else b'{"text": "x"}' for row in range(50)]
    folder = write(tmp_path / "data", {"a.jsonl": b"\n".join(rows)})

    def logged(rank: str) -> list[str]:
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        read_stream(folder, tokenizer_folder, max_unusable_fraction=0.5)
        return [message.replace(str(folder), "DIR") for message in caplog.messages]

    # The last one is of the next epoch, in which the reader is one run ahead.
    *messages, _ = logged("0")
    assert messages == [
        f"corpus DIR: {message}{'not a text' if message == FIRST else ''}" for message in expected
    ]
    assert logged("1") == []


def test_parquet_rows_without_text_are_named(tmp_path: Path) -> None:
    files = {
        "a.parquet": parquet({"text": ["x"] * 300 + [None]}),
        "b.parquet": parquet({"text": [b"x", b"\xff"]}, text=pyarrow.binary()),
    }
    folder = write(tmp_path / "data", files)
    assert len(read(folder, max_unusable_fraction=0.5)) == 300
    with pytest.raises(DataError, match=r"a.parquet, row 301: 'text' is null"):
        read(folder, max_unusable_fraction=0.0)
    with pytest.raises(DataError, match=r"b.parquet, row 1: 'text' is of type bytes"):
        read(folder / "b.parquet")
    invalid = pyarrow.array(["x", "yz"]).buffers()
    text = pyarrow.StringArray.from_buffers(2, invalid[1], pyarrow.py_buffer(b"x\xff\xfe"), None)
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), folder / "c.parquet")
    with pytest.raises(DataError, match=r"c.parquet, row 2: it has text that is not UTF-8. Corr"):
        read(folder / "c.parquet")


def test_damaged_pages_of_parquet_are_not_taken_for_compression(tmp_path: Path) -> None:
    content = parquet({"text": ["x"] * 300})
    (tmp_path / "a.parquet").write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file that can be read \(.*Repl"):
        read(tmp_path)


@pytest.mark.parametrize("content", [GOOD, b""], ids=["not xz", "empty"])
def test_conversations_in_a_file_that_is_not_compressed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.xz"
    path.write_bytes(content)
    config = CorpusConfig(dataset_path=str(path), messages_column="messages")
    corpus = open_corpus(config)
    with pytest.raises(DataError) as raised:
        list(read_conversations(corpus, UnusableRows(corpus)))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_conversations_that_are_not_utf8_are_listed_with_their_position(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n')
    corpus = open_corpus(CorpusConfig(dataset_path=str(path), messages_column="messages"))
    unusable = UnusableRows(corpus)
    assert list(read_conversations(corpus, unusable)) == []
    with pytest.raises(DataError, match=r"chat.jsonl:1: not UTF-8 \(byte 0xe9 in column 47\)"):
        unusable.check()


def test_no_fraction_of_damaged_conversations_is_offered(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"{}\n" * 30 + b'{"messages": \n' + b"{}\n")
    config = CorpusConfig(
        dataset_path=str(path), messages_column="messages", max_unusable_fraction=1.0
    )
    corpus = open_corpus(config)
    unusable = UnusableRows(corpus)
    assert list(read_conversations(corpus, unusable)) == []
    with pytest.raises(DataError) as raised:
        unusable.check()
    message = str(raised.value)
    assert "\n  and 12 more\n" in message
    assert (
        f"\nCorrect or remove them: damage, of 1 of them, is an error whatever "
        f"max_unusable_fraction is; the first is {path}:31. A conversation is "
    ) in message
