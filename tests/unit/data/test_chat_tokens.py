"""Chat templates and assistant tokens, compared with transformers and with the messages."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.data.chat_templates import (
    CHATML,
    CHATML_MARKED,
    FORGETS_THOUGHTS,
    INSTRUCT,
    LLAMA_3,
    TEMPLATES,
    WITH_DEFAULT_SYSTEM,
    chat_messages,
    write_tokenizer,
)
from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import chat_tokens
from torchtitan_lite.data.chat_template import (
    DEFAULT_TEMPLATE,
    ChatTemplate,
    TemplateRejection,
    find_template,
)
from torchtitan_lite.data.chat_tokens import ConversationTokens, tokenize_conversations
from torchtitan_lite.data.conversations import Conversation
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.unusable_rows import UnusableRows

Messages = list[dict[str, Any]]
TOOLS: Messages = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "tool_calls": [{"name": "thermometer", "arguments": {"où": "<here>"}}]},
    {"role": "tool", "content": "19 °C"},
    {"role": "assistant", "content": "It is nineteen degrees."},
]


def unusable(folder: Path) -> UnusableRows:
    (folder / "some.jsonl").touch()
    config = CorpusConfig(dataset_path=str(folder / "some.jsonl"), messages_column="messages")
    return UnusableRows(open_corpus(config))


def tokens_of(
    folder: Path, messages: list[Messages], refused: UnusableRows | None = None
) -> list[ConversationTokens]:
    conversations = [
        Conversation(place=f"chat.jsonl:{number}", messages=one, text=json.dumps(one))
        for number, one in enumerate(messages, start=1)
    ]
    refused = unusable(folder) if refused is None else refused
    return tokenize_conversations(
        load_tokenizer(folder), find_template(folder), conversations, refused
    )


def mask(tokens: ConversationTokens) -> list[int]:
    places = np.arange(len(tokens.ids))
    return (np.searchsorted(tokens.target_bounds, places, side="right") % 2).tolist()


def transformers_tokens(folder: Path, messages: list[Messages], *, masks: bool) -> list[Any]:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return [
        theirs.apply_chat_template(
            one, tokenize=True, return_dict=True, return_assistant_tokens_mask=masks
        )
        for one in messages
    ]


def without_system(messages: list[Messages]) -> list[Messages]:
    return [one for one in messages if one[0]["role"] != "system"]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_equal_those_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_tokenizer(tmp_path, TEMPLATES[name], kind)
    messages: list[Messages] = [*chat_messages()]
    if name == "instruct":
        messages = without_system(messages)
    if name == "default system":
        messages.append(TOOLS)
    theirs = transformers_tokens(folder, messages, masks=False)
    ours = tokens_of(folder, messages)
    assert [tokens.ids.tolist() for tokens in ours] == [one["input_ids"] for one in theirs]


@pytest.mark.parametrize("template", [DEFAULT_TEMPLATE, CHATML_MARKED], ids=["ours", "chatml"])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_generation_blocks_give_the_masks_of_transformers(
    tmp_path: Path, template: str, kind: str
) -> None:
    folder = write_tokenizer(tmp_path, template, kind)
    messages = chat_messages()
    theirs = transformers_tokens(folder, messages, masks=True)
    ours = tokens_of(folder, messages)
    assert [mask(tokens) for tokens in ours] == [one["assistant_masks"] for one in theirs]
    assert all(len(tokens.target_bounds) for tokens in ours)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize(
    ("plain", "marked"), [(CHATML, CHATML_MARKED), (LLAMA_3, DEFAULT_TEMPLATE)], ids=["chatml", "3"]
)
def test_templates_without_generation_blocks_give_the_same_masks(
    tmp_path: Path, plain: str, marked: str, kind: str
) -> None:
    messages = chat_messages()
    of_plain = tokens_of(write_tokenizer(tmp_path / "plain", plain, kind), messages)
    of_marked = tokens_of(write_tokenizer(tmp_path / "marked", marked, kind), messages)
    assert list(map(mask, of_plain)) == list(map(mask, of_marked))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA_3, "{}<|eot_id|>"),
        (DEFAULT_TEMPLATE, "{}<|eot_id|>"),
        (CHATML, "{}<|im_end|>"),
        (WITH_DEFAULT_SYSTEM, "{}<|im_end|>"),
        (INSTRUCT, " {}<|end_of_text|>"),
    ],
)
def test_targets_are_assistant_messages_and_their_end_tokens(
    tmp_path: Path, template: str, said: str
) -> None:
    from tokenizers import Tokenizer

    folder = write_tokenizer(tmp_path, template)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    messages = without_system(chat_messages()[:-4])
    for one, tokens in zip(messages, tokens_of(folder, messages), strict=True):
        expected = [said.format(m["content"]) for m in one if m["role"] == "assistant"]
        runs = tokens.target_bounds.reshape(-1, 2)
        decoded = [
            inner.decode(tokens.ids[begin:end].tolist(), skip_special_tokens=False)
            for begin, end in runs
        ]
        assert decoded == expected


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
def test_messages_of_weight_0_are_no_targets(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages: Messages = [{"role": role, "content": text} for role, text in turns]
    [whole] = tokens_of(folder, [messages])
    for index, bounds in ((1, whole.target_bounds[2:]), (3, whole.target_bounds[:2])):
        weighted = [{**m, "weight": int(n != index)} for n, m in enumerate(messages)]
        [tokens] = tokens_of(folder, [weighted])
        assert tokens.ids.tolist() == whole.ids.tolist()
        assert tokens.target_bounds.tolist() == bounds.tolist()


def test_weights_need_a_generation_block_for_each_message(tmp_path: Path) -> None:
    source = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    folder = write_tokenizer(tmp_path, source)
    one, two = chat_messages()[0][:2], chat_messages()[2]
    rejected = unusable(folder)
    assert tokens_of(folder, [[*one, {**two[1], "weight": 0}]], rejected) == []
    assert len(rejected) == 1


def test_user_messages_change_no_target(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, CHATML)
    messages = chat_messages()
    changed = [
        [
            {**m, "content": f"Other {m['content']} 谢"} if m["role"] != "assistant" else m
            for m in one
        ]
        for one in messages
    ]
    for before, after in zip(tokens_of(folder, messages), tokens_of(folder, changed), strict=True):
        output = [tokens.ids[np.array(mask(tokens)) == 1].tolist() for tokens in (before, after)]
        assert output[0] == output[1] != []
        assert before.ids.tolist() != after.ids.tolist()


def test_a_template_that_rewrites_earlier_turns_is_rejected(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, FORGETS_THOUGHTS)
    once, twice = chat_messages()[0], chat_messages()[2]
    [tokens] = tokens_of(folder, [once])
    assert len(tokens.target_bounds) == 2
    message = (
        r"chat_template.jinja does not show where message 2 of chat.jsonl:2 begins.*generation"
    )
    with pytest.raises(DataError, match=message):
        tokens_of(folder, [once, twice])


def test_errors_of_a_template_are_collected(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, INSTRUCT)
    messages = chat_messages()
    rejected = unusable(folder)
    kept = tokens_of(folder, messages, rejected)
    assert len(kept) == len(without_system(messages)) == len(messages) - len(rejected)
    with pytest.raises(DataError, match=r"chat.jsonl:4: the template rejects it.*No system here!"):
        rejected.check()


def test_locations_of_a_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    with pytest.raises(DataError, match=r"has no chat template.*Add chat_template.jinja"):
        find_template(folder)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "x"}')
    config_file.write_text(json.dumps(config | {"chat_template": CHATML}))
    actual = find_template(folder)
    assert (actual.name, actual.source) == (str(config_file), CHATML)
    assert actual.special_tokens == {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "x",
        "pad_token": "<pad>",
    }
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA_3}]
    config_file.write_text(json.dumps(config | {"chat_template": named}))
    assert find_template(folder).source == LLAMA_3
    config_file.write_text(json.dumps(config | {"chat_template": named[:1]}))
    with pytest.raises(DataError, match="'tool_use', but none named \"default\""):
        find_template(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    assert find_template(folder).name.endswith("chat_template.jinja")


@pytest.mark.parametrize(
    "tokens",
    [{"image_token": "<image>"}, {"extra_special_tokens": {"image_token": {"content": "<image>"}}}],
)
def test_tokens_of_the_model_have_names_in_a_template(
    tmp_path: Path, tokens: dict[str, Any]
) -> None:
    folder = write_tokenizer(tmp_path, "{{ bos_token }}{{ image_token }}{{ add_bos_token }}")
    config_file = folder / "tokenizer_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | tokens))
    assert find_template(folder).render(chat_messages()[0]) == "<|begin_of_text|><image>"


def rendered(folder: Path, source: str) -> str:
    (folder / "chat_template.jinja").write_text(source)
    return find_template(folder).render(chat_messages()[0])


def test_the_date_is_fixed_and_templates_are_sandboxed(tmp_path: Path) -> None:
    assert rendered(tmp_path, "{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    for way_out in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
    ):
        with pytest.raises(TemplateRejection):
            rendered(tmp_path, way_out)
    with pytest.raises(DataError, match=r"jinja is not a chat template .* \(line 2 of"):
        rendered(tmp_path, "{{ bos_token }}\n{% for message %}")


def test_markers_that_change_the_text_are_detected(tmp_path: Path) -> None:
    counted = "{% set said %}{% generation %}x{% endgeneration %}{% endset %}{{ said | length }}"
    (tmp_path / "chat_template.jinja").write_text(counted)
    with pytest.raises(TemplateRejection, match="the text changes"):
        find_template(tmp_path).render_with_spans(chat_messages()[0])
    kept = counted.replace(" | length", "") + "{{ said }}"
    (tmp_path / "chat_template.jinja").write_text(kept)
    actual = find_template(tmp_path).render_with_spans(chat_messages()[0])
    assert actual == ("xx", [(0, 1), (1, 2)])


def test_an_undefined_value_is_reported_once() -> None:
    template: Any = object.__new__(ChatTemplate)
    template.__dict__["_compiled"] = SimpleNamespace(undefined={"tools"})
    assert [template.take_undefined() for _ in range(2)] == [{"tools"}, set()]


def test_only_what_a_generation_block_marks_is_a_target(tmp_path: Path) -> None:
    """Although the same messages without the marks would make the ends of the answers targets."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = write_tokenizer(tmp_path, source)
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    (tokens,) = tokens_of(folder, [messages])
    targets = tokens.ids[np.array(mask(tokens)) == 1].tolist()
    assert load_tokenizer(folder).decode(targets) == "Yes."


@pytest.mark.parametrize(
    ("spans", "bounds"),
    [
        ([(0, 6)], [0, 2]),
        ([(1, 2)], [0, 1]),
        ([(3, 6)], [1, 2]),
        # Without text, also within a token.
        ([(3, 3)], []),
        ([(2, 2)], []),
        # The end of a span and the next one, in one token.
        ([(0, 4), (4, 6)], [0, 2]),
    ],
)
def test_targets_are_the_tokens_with_text_of_the_assistant(
    spans: list[tuple[int, int]], bounds: list[int]
) -> None:
    found = chat_tokens._token_bounds(np.array([0, 3]), np.array([3, 6]), spans)
    assert found.tolist() == bounds
