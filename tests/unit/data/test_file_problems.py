"""Unreadable data files: one line with the file, the line number and the remedy."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.data.conversations import Unusable, read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.stream import StreamedBlocks
from torchtitan_lite.data.stream_reader import StreamReader
from torchtitan_lite.data.tokenization import DocumentTokenizer
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.errors import DataError
from torchtitan_lite.schema.data import CorpusConfig

GOOD = b'{"text": "one"}\n{"text": "two"}\n'
HUGE = b'{"text": "x", "n": 1' + b"0" * 5000 + b"}"
TOO_MANY_DIGITS = "an integer has more than 4300 digits, the limit of Python."
GZIP = gzip.compress(GOOD)
CONVERT = "Convert the file, for example by iconv -f LATIN1 -t UTF-8."

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
    "blank lines": (
        {"a.jsonl": b"\n\n"},
        "DIR/a.jsonl: no documents, only blank lines. Write documents to it, or exclude it.",
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
        'DIR/a.jsonl:3: a number, but a document must be a JSON object such as {"text": "..."}. '
        "Correct it or remove it.",
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
    "files with other keys": (
        {"a.jsonl": GOOD, "b.jsonl": b'{"text": "x", "url": "y"}\n'},
        "DIR/b.jsonl: its first document has the keys 'text', 'url', that of DIR/a.jsonl has "
        "'text', and all files of a corpus must have the same. Remove the others, or name the "
        "files in several [[training.corpora]].",
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
    "not Parquet": (
        {"a.parquet": b"none"},
        "DIR/a.parquet: not a Parquet file that can be read (Parquet file size is 4 bytes, smaller "
        "than the minimum file footer (8 bytes)). Replace it, or exclude it from dataset_path.",
    ),
}


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
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    config = CorpusConfig(dataset_path=str(folder), streaming=streaming)
    with pytest.raises(DataError) as raised:
        corpus = open_corpus(config, tmp_path / "cache")
        if streaming:
            tokenizer = DocumentTokenizer(load_tokenizer(tokenizer_folder))
            StreamedBlocks(StreamReader(corpus, tokenizer), 4).read(np.arange(8))
        else:
            list(corpus.documents())
    assert str(raised.value).replace(str(folder), "DIR") == expected
    assert "Failed to" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "files",
    [
        {"a.jsonl": b"", "b.jsonl": GOOD},
        {"a.jsonl": b"\xef\xbb\xbf" + GOOD},
        {"a.jsonl": GOOD + b"\n"},
        {"a.json": b'{\n "text": "one"\n}\n'},
    ],
    ids=["one of two is empty", "byte order mark", "blank line", "one object over lines"],
)
def test_readable_files_are_read(files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    corpus = open_corpus(CorpusConfig(dataset_path=str(folder)), tmp_path / "cache")
    assert next(corpus.documents()) == "one"


@pytest.mark.parametrize("content", [GOOD, b""], ids=["not xz", "empty"])
def test_conversations_in_a_file_that_is_not_compressed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.xz"
    path.write_bytes(content)
    config = CorpusConfig(dataset_path=str(path), messages_column="messages")
    corpus = open_corpus(config, tmp_path / "cache")
    with pytest.raises(DataError) as raised:
        list(read_conversations(corpus, Unusable(corpus)))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_conversations_that_are_not_utf8_are_listed_with_their_position(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n')
    corpus = open_corpus(
        CorpusConfig(dataset_path=str(path), messages_column="messages"), tmp_path / "cache"
    )
    unusable = Unusable(corpus)
    assert list(read_conversations(corpus, unusable)) == []
    with pytest.raises(DataError, match=r"chat.jsonl:1: not UTF-8 \(byte 0xe9, column 47\)"):
        unusable.check()
