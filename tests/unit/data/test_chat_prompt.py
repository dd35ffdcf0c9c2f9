"""Prompts of a chat: as transformers renders them, with the token that ends an answer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.chat_prompt import chat_prompt, first_question
from torchtitan_lite.data.chat_template import DEFAULT_TEMPLATE, find_template
from torchtitan_lite.data.tokenizer import load_tokenizer, train_tokenizer

CHAT = "tests/assets/chat.jsonl"
CHATML = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}<|eot_id|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|><think>{% endif %}"
)
"""The prompt of an answer is no prefix of the conversation with the answer."""
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What does <|eot_id|> do?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.loads(line) for line in Path(CHAT).read_text().splitlines()]
    texts = (message["content"] for row in rows for message in row["messages"])
    train_tokenizer(texts, 400, chat=True).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", [DEFAULT_TEMPLATE, CHATML])
def test_prompts_are_those_of_transformers(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    prompt = chat_prompt(tokenizer, find_template(folder), MESSAGES)
    peer = AutoTokenizer.from_pretrained(folder)
    expected = peer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(prompt.ids) == expected
    assert prompt.stop_ids == {peer.convert_tokens_to_ids("<|eot_id|>")}


def test_a_template_without_an_end_of_turn_gives_no_stop(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    prompt = chat_prompt(load_tokenizer(folder), find_template(folder), MESSAGES)
    assert prompt.stop_ids == frozenset()


def test_a_template_that_rejects_the_messages_says_why(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(DataError, match=r"chat_template.jinja rejects .* no system message"):
        chat_prompt(load_tokenizer(folder), find_template(folder), MESSAGES)


def test_the_first_question_ends_before_the_first_answer(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' and messages | length == 1 %}"
        "{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer, template = load_tokenizer(folder), find_template(folder)

    def question(*conversations: list[str]) -> list[str] | None:
        rows = [
            {"messages": [{"role": role, "content": role} for role in roles]}
            for roles in conversations
        ]
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = CorpusConfig(dataset_path=CHAT)
        chat = CorpusConfig(dataset_path=str(tmp_path / "chat.jsonl"), messages_column="messages")
        found = first_question(tokenizer, template, [text, chat])
        return None if found is None else [message["role"] for message in found.messages]

    assert question(["system", "user", "assistant", "user", "assistant"]) == ["system", "user"]
    assert question(["user"]) is None
    # Rejected by the template, which accepts the whole conversation.
    rejected = ["system", "assistant", "user", "assistant"]
    assert question(rejected, ["user", "assistant"]) == ["user"]
    assert question(rejected) is None
    assert first_question(tokenizer, template, [CorpusConfig(dataset_path=CHAT)]) is None


def test_the_tools_of_the_first_question_reach_the_template(folder: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    row = {"messages": messages, "tools": tools}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    source = "{{ tools[0].function.name if tools else 'none' }}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(source)
    tokenizer, template = load_tokenizer(folder), find_template(folder)
    corpus = CorpusConfig(dataset_path=str(tmp_path / "chat.jsonl"), messages_column="messages")
    prompt = first_question(tokenizer, template, [corpus])
    assert prompt is not None and prompt.messages == messages[:1]
    assert tokenizer.decode(prompt.ids) == "add1 + 1?"
