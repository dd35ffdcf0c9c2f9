"""Tools and other variables of a template: rows give what `apply_chat_template` takes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.chat_templates import (
    CHATML,
    WITH_ARGUMENT_TEXT,
    WITH_TOOLS,
    WITH_TOOLS_OF_USER,
    write_tokenizer,
)
from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.chat_template import DEFAULT_TEMPLATE, find_template
from torchtitan_lite.data.chat_tokens import tokenize_conversations
from torchtitan_lite.data.conversations import read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.unusable_rows import UnusableRows

Row = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "thermometer",
        "description": "Measures <here> & now",
        "parameters": {"type": "object", "properties": {"où": {"type": "string"}}},
    },
}
ARGUMENTS = {"où": "Genève", "when": None, "digits": 2}
CALL = {"id": "call_1", "type": "function", "function": {"name": "thermometer"}}


def messages(arguments: Any = ARGUMENTS) -> list[Row]:
    function = {**CALL["function"], "arguments": arguments}
    return [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "19 °C"},
        {"role": "assistant", "content": "It is nineteen degrees."},
    ]


def ids_of(
    folder: Path, rows: list[Row], *, fraction: float = 0.0
) -> tuple[list[list[int]], UnusableRows]:
    """Return the ids of each row, read from a file, and the report."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CorpusConfig(
        dataset_path=str(path), messages_column="messages", max_unusable_fraction=fraction
    )
    corpus = open_corpus(config)
    unusable, template = UnusableRows(corpus), find_template(folder)
    conversations = list(read_conversations(corpus, unusable, template.variables))
    tokens = tokenize_conversations(load_tokenizer(folder), template, conversations, unusable)
    unusable.check()
    return [one.ids.tolist() for one in tokens], unusable


def theirs(folder: Path, messages: list[Row], **variables: Any) -> list[int]:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, return_dict=True, **variables)["input_ids"]


@pytest.mark.parametrize("template", [WITH_TOOLS, WITH_TOOLS_OF_USER], ids=["qwen", "llama"])
@pytest.mark.parametrize(
    "given",
    [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL, TOOL], [], None, ""],
    ids=["list", "text", "texts", "two", "none", "null", "empty text"],
)
def test_tools_reach_the_template(tmp_path: Path, template: str, given: Any) -> None:
    folder = write_tokenizer(tmp_path, template)
    parsed = json.loads(given) if isinstance(given, str) and given else given
    tools = [json.loads(t) if isinstance(t, str) else t for t in parsed] if parsed else parsed
    expected = theirs(folder, messages(), tools=None if tools == "" else tools)
    (actual,), unusable = ids_of(folder, [{"messages": messages(), "tools": given}])
    assert actual == expected
    assert not unusable.values()["remarks"]
    if tools:
        assert actual != theirs(folder, messages())


@pytest.mark.parametrize("template", [WITH_TOOLS, WITH_TOOLS_OF_USER], ids=["qwen", "llama"])
def test_arguments_as_text_are_arguments(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    expected = theirs(folder, messages(), tools=[TOOL])
    for text in (json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=2, ensure_ascii=False)):
        (actual,), _ = ids_of(folder, [{"messages": messages(text), "tools": [TOOL]}])
        assert actual == expected
    # OpenAI's form of a call without arguments.
    (actual,), _ = ids_of(folder, [{"messages": messages("")}])
    assert actual == theirs(folder, messages({}))


def test_a_template_of_texts_gets_texts(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, WITH_ARGUMENT_TEXT)
    text = json.dumps(ARGUMENTS, indent=1, ensure_ascii=False)
    (as_given, converted), _ = ids_of(
        folder, [{"messages": messages(a)} for a in (text, ARGUMENTS)]
    )
    assert as_given == theirs(folder, messages(text))
    assert converted == theirs(folder, messages(json.dumps(ARGUMENTS, ensure_ascii=False)))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": messages("{oops")}, "message 2 has text that is not JSON as the arguments"),
        ({"messages": messages("3")}, "message 2 has JSON that is no object as the arguments"),
        ({"messages": messages(), "tools": "[{"}, "tools is text that is not JSON"),
        ({"messages": messages(), "tools": {"a": 1}}, "tools is an object, not a list"),
        ({"messages": messages(), "tools": [3]}, "tools contains a number, not only objects"),
        ({"messages": messages(), "chat_template_kwargs": [3]}, "chat_template_kwargs is a list"),
        ({"messages": messages(), "tools": ["{}", "\ud83d"]}, "tools is text that is not JSON"),
        ({"messages": messages(), "documents": 1}, "documents is a number, not a list"),
    ],
)
def test_wrong_variables_are_named(tmp_path: Path, row: Row, why: str) -> None:
    folder = write_tokenizer(tmp_path, WITH_TOOLS)
    with pytest.raises(DataError) as raised:
        ids_of(folder, [row])
    assert f"rows.jsonl:1: {why}" in str(raised.value)


def test_other_variables_come_from_columns(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, WITH_TOOLS)
    rows = [
        {"messages": messages(), "enable_thinking": False},
        {"messages": messages(), "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": messages(), "chat_template_kwargs": '{"enable_thinking": false}'},
        {"messages": messages(), "enable_thinking": None, "chat_template_kwargs": None},
        {"messages": messages(), "unknown": 3},
    ]
    actual, unusable = ids_of(folder, rows)
    without = theirs(folder, messages(), enable_thinking=False)
    assert actual == [without] * 3 + [theirs(folder, messages())] * 2
    assert without != actual[-1]
    assert not unusable.values()["remarks"]
    dated = write_tokenizer(tmp_path / "dated", WITH_TOOLS_OF_USER)
    row = {"messages": messages(), "date_string": "1 Jan 2020", "custom_tools": [TOOL]}
    (actual,), _ = ids_of(dated, [row])
    assert actual == theirs(dated, messages(), date_string="1 Jan 2020", custom_tools=[TOOL])


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_any_of_its_names(tmp_path: Path, key: str) -> None:
    folder = write_tokenizer(tmp_path, WITH_TOOLS)
    thought = [*messages()[:3], {**messages()[3], key: "Nineteen, said it."}]
    (actual,), _ = ids_of(folder, [{"messages": thought}])
    assert actual == theirs(folder, thought)
    assert actual != theirs(folder, messages())


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages(), "tools": [TOOL]}, {"messages": plain}]
    expected = [theirs(folder, messages(), tools=[TOOL]), theirs(folder, plain)]
    before = find_template(folder)
    assert ids_of(folder, rows)[0] == expected
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    config_file = folder / "tokenizer_config.json"
    named = [{"name": n, "template": t} for n, t in (("tool_use", WITH_TOOLS), ("default", CHATML))]
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"chat_template": named})
    )
    assert ids_of(folder, rows)[0] == expected
    after = find_template(folder)
    assert after.fingerprint == before.fingerprint
    assert after.fingerprint != replace(after, with_tools=None).fingerprint
    config_file.write_text('{"chat_template": 3}')
    with pytest.raises(DataError, match="neither a text nor a list of templates"):
        find_template(folder)


def test_what_a_template_ignores_or_lacks_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "{{ persona }}" + CHATML.replace(
        "message['content']", "message.name ~ message.content"
    )
    folder = write_tokenizer(tmp_path, source)
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": plain, "tools": [TOOL]}
    (actual, _), unusable = ids_of(folder, [row, row])
    assert actual == theirs(folder, plain, tools=[TOOL])
    unusable.report()
    template, first = folder / "chat_template.jinja", folder / "rows.jsonl:1"
    for what in (
        f"lack persona, and {template} writes nothing",
        f"lack .name, and {template} writes nothing",
        f"have tools, and {template} does not read it",
    ):
        assert f"2 of 2 conversations {what}; the first is {first}" in caplog.text
    # What stops the template is in the error.
    (folder / "chat_template.jinja").write_text("{{ 'You are ' + persona }}" + CHATML)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the template rejects.*'persona' is undef"):
        ids_of(folder, [row])


def test_lists_of_parts_are_never_trained_on_as_python_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]}
    folder = write_tokenizer(tmp_path / "ours", DEFAULT_TEMPLATE)
    (actual,), unusable = ids_of(folder, [row])
    assert len(unusable) == 0
    joined = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert actual == theirs(folder, joined)
    folder = write_tokenizer(
        tmp_path / "theirs", CHATML.replace("message['content']", "message.content ~ ''")
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: the template writes a list of parts"):
        ids_of(folder, [row])


def test_tool_calls_that_a_template_does_not_read_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tokenizer(tmp_path, DEFAULT_TEMPLATE)
    _, unusable = ids_of(folder, [{"messages": messages()}])
    unusable.report()
    assert "conversation have tool calls, and" in caplog.text.replace(
        "conversations", "conversation"
    )


def test_tables_have_the_tools_of_their_rows(tmp_path: Path) -> None:
    """A table gives each object the keys of all objects, with null."""
    import datasets

    folder = write_tokenizer(tmp_path, WITH_TOOLS)
    other = {"type": "function", "function": {"name": "clock", "description": "Tells the time"}}
    arguments = {"où": "Genève"}
    rows = [
        {"messages": messages(arguments), "tools": [TOOL]},
        {"messages": messages({"zone": "UTC"}), "tools": [other]},
    ]
    expected, _ = ids_of(folder, rows)
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    corpus = open_corpus(CorpusConfig(dataset_path=str(path), messages_column="messages"))
    unusable, template = UnusableRows(corpus), find_template(folder)
    conversations = list(read_conversations(corpus, unusable, template.variables))
    tokens = tokenize_conversations(load_tokenizer(folder), template, conversations, unusable)
    assert [one.ids.tolist() for one in tokens] == expected
