"""Conversations in every format; all invalid ones are reported at once."""

import datetime
import gzip
import json
from pathlib import Path

import pytest

from tests.unit.data.chat_templates import CHAT
from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.conversations import Conversation, read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.unusable_rows import UnusableRows

LINES = CHAT.read_text().splitlines()


def read(path: Path, cache: Path, column: str = "messages") -> list[Conversation]:
    corpus = open_corpus(CorpusConfig(dataset_path=str(path), messages_column=column))
    unusable = UnusableRows(corpus)
    result = list(read_conversations(corpus, unusable))
    unusable.check()
    return result


@pytest.mark.parametrize("format", ["jsonl", "list", "gz", "parquet"])
def test_every_format_gives_the_same_conversations(tmp_path: Path, format: str) -> None:
    values = [json.loads(line) for line in LINES]
    expected = [value["messages"] for value in values]
    folder = tmp_path / "data"
    folder.mkdir()
    if format == "jsonl":
        for name, part in (("a", LINES[:20]), ("b", LINES[20:])):
            (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    elif format == "list":
        (folder / "all.json").write_text(json.dumps(values, indent=1))
    elif format == "gz":
        (folder / "all.jsonl.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
    else:
        import datasets

        # A table gives each message the keys of all messages: missing `name`s are null.
        values[0]["messages"][0]["name"] = "Ada"
        datasets.Dataset.from_list(values).to_parquet(str(folder / "all.parquet"))
    actual = read(folder, tmp_path / "cache")
    assert [one.messages for one in actual] == expected
    assert [one.text for one in actual] == [
        json.dumps(messages, ensure_ascii=False, sort_keys=True) for messages in expected
    ]
    last = actual[-1].place
    assert (
        last
        == {
            "jsonl": f"{folder}/b.jsonl:{len(LINES) - 20}",
            "list": f"{folder}/all.json, item {len(LINES)}",
            "gz": f"{folder}/all.jsonl.gz:{len(LINES)}",
            "parquet": f"{folder}/all.parquet, row {len(LINES)}",
        }[format]
    )


WRONG = {
    '{"messages": [': "not JSON (Expecting value, column 15)",
    '"text"': "not a JSON object but a text",
    '{"text": "x", "id": 3}': "it has no 'messages'; its columns are 'text', 'id'",
    '{"messages": "Hello"}': "the messages are a text, not a list",
    '{"messages": []}': "it has no messages",
    '{"messages": ["Hello"]}': "message 1 is a text, not an object with role and content",
    '{"messages": [{"from": "human", "value": "Hello"}]}': (
        "message 1 has no role; its keys are 'from', 'value'"
    ),
    '{"messages": [{"role": "user", "content": "a"}, {"role": "human", "content": "b"}]}': (
        "message 2 has the role 'human'; known are system, developer, user, assistant, tool"
    ),
    '{"messages": [{"role": "assistant"}]}': "message 1 has no content",
    '{"messages": [{"role": "user", "content": 3}]}': "message 1 has a number as its content",
    '{"messages": [{"role": "user", "content": "x", "weight": 0.5}]}': "message 1 has the weight 0",
    '{"messages": [{"role": "user", "content": "x", "content": "y"}]}': (
        "message 1 gives content several times, with different values"
    ),
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}': "it contains an unpaired surrogate",
}


def test_all_invalid_conversations_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join([LINES[0], *WRONG, LINES[1]]) + "\n")
    with pytest.raises(DataError) as raised:
        read(file, tmp_path / "cache")
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{len(WRONG)} conversations of {file} cannot be used:"
    for line, (number, why) in zip(lines[1:-1], enumerate(WRONG.values(), start=2), strict=True):
        assert line.startswith(f"  {file}:{number}: {why}")
    assert 'A conversation is {"messages": [{"role": "user"' in lines[-1]


def test_many_invalid_conversations_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("{}\n" * 500)
    with pytest.raises(DataError, match=r"500 conversations of (?s:.*):20: (?s:.*)and 480 more"):
        read(file, tmp_path / "cache")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl.gz"
    file.write_bytes(gzip.compress(LINES[0].encode() * 50)[:-20])
    with pytest.raises(DataError, match=rf"{file}: not a .gz file that can be decompressed"):
        read(file, tmp_path / "cache")
    file = tmp_path / "chat.json"
    file.write_text('[{"messages": []},')
    with pytest.raises(DataError, match=rf"{file}:1: not JSON \(Expecting value"):
        read(file, tmp_path / "cache")
    table = tmp_path / "chat.parquet"
    import datasets

    datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(str(table))
    with pytest.raises(DataError, match=r"row 1: it has no 'messages'; its columns are 'text'"):
        read(table, tmp_path / "cache")
    at = [{"role": "user", "content": "x", "at": datetime.datetime(2024, 1, 1)}]
    datasets.Dataset.from_dict({"messages": [at]}).to_parquet(str(table))
    with pytest.raises(
        DataError, match=r"row 1: it contains a value that is not valid JSON \(Object of"
    ):
        read(table, tmp_path / "cache")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"the files of .*a.txt are text. Set dataset_path"):
        read(tmp_path / "a.txt", tmp_path / "cache")
