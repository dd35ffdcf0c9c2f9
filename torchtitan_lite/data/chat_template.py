"""The chat template of a tokenizer, which renders a conversation as one text.

Finds and renders templates. Layer: above errors. Invariants: the rendered text equals that of
`apply_chat_template` of transformers, so that training and inference use the same prompts; it
depends on the files and the messages only, not on the date; and a template runs in Jinja's sandbox,
without access to files or Python's internals. `jinja2` is imported when a template is compiled, so
that a start with a warm token cache does not import it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import DataError

END_OF_TURN = "<|eot_id|>"
TURN_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", END_OF_TURN)
"""Special tokens of `DEFAULT_TEMPLATE`."""

DEFAULT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Template of tokenizers trained here: Llama 3's turns, without its dates and tools."""

TODAY = datetime(2024, 7, 26)
"""Result of `strftime_now` in a template: the default date of Llama 3's templates. The real date
would make a corpus' tokens depend on the day of tokenization."""

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SPAN_BEGIN, _SPAN_END = "\U0010f5b0", "\U0010f5b1"
"""Private-use characters; `ChatTemplate.render_with_spans` checks that a text does not contain
them."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template that is not compiled yet."""

    name: str
    """Its file, for messages."""
    source: str
    special_tokens: Mapping[str, str]
    """Special tokens by name: `bos_token`, `eos_token` and so on."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that changes if the rendered text may have changed."""
        parts = [self.source, json.dumps(dict(self.special_tokens), sort_keys=True), str(TODAY)]
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def has_generation_blocks(self) -> bool:
        """Whether `{% generation %}` blocks mark the assistant's text."""
        return self._compiled.generation.is_used

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation; `add_generation_prompt` appends the header of the assistant's next
        message. Raises TemplateRejection."""
        template = self._compiled.template
        try:
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # A template is a program: besides Jinja's errors, any expression may raise.
        except Exception as error:
            raise TemplateRejection(f"{type(error).__name__}: {error}") from error

    def render_with_spans(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and return the character ranges [begin, end) of its `{% generation
        %}` blocks. Raises TemplateRejection."""
        plain = self.render(messages)
        generation = self._compiled.generation
        generation.marks = (_SPAN_BEGIN, _SPAN_END)
        try:
            marked = self.render(messages)
        finally:
            generation.marks = ("", "")
        pieces, spans, place, begin = [], [], 0, 0
        for piece in re.split(f"([{_SPAN_BEGIN}{_SPAN_END}])", marked):
            if piece == _SPAN_BEGIN:
                begin = place
            elif piece == _SPAN_END:
                spans.append((begin, place))
            else:
                pieces.append(piece)
                place += len(piece)
        if "".join(pieces) != plain:
            raise TemplateRejection(
                "the text changes when the places of {% generation %} blocks are marked in it; "
                "a filter around such a block, or U+10F5B0 or U+10F5B1 in a message, does that"
            )
        return plain, spans

    @cached_property
    def _compiled(self) -> Any:
        from torchtitan_lite.data.template_environment import compile_template

        return compile_template(self.name, self.source, TODAY)


class TemplateRejection(Exception):
    """The template rejects a conversation; the text says why."""


def find_template(folder: Path) -> ChatTemplate:
    """Find the template of the tokenizer in `folder`: chat_template.jinja, else `chat_template` in
    tokenizer_config.json. Raises DataError if there is none."""
    config_file = folder / "tokenizer_config.json"
    config = _read_json(config_file)
    file = folder / "chat_template.jinja"
    if file.is_file():
        name, source = str(file), file.read_text(encoding="utf-8")
    else:
        name, source = str(config_file), _in_config(config.get("chat_template"), config_file)
    if source is None:
        raise DataError(
            f"the tokenizer in {folder} has no chat template, which a chat (a corpus with "
            f"messages_column, or --chat) needs. Add chat_template.jinja to that folder (the "
            f"template of the model's chat version, which then has the tokens that it uses), or "
            f'"chat_template" to tokenizer_config.json.'
        )
    # Older folders define the tokens in a separate file.
    named = _read_json(folder / "special_tokens_map.json") | config
    special_tokens = {
        f"{kind}_token": _content(named[f"{kind}_token"])
        for kind in _NAMED_TOKENS
        if named.get(f"{kind}_token") is not None
    }
    return ChatTemplate(name=name, source=source, special_tokens=special_tokens)


def _in_config(value: Any, config_file: Path) -> str | None:
    """Return the template in `tokenizer_config.json`: a text, or the "default" one in a list."""
    if value is None or isinstance(value, str):
        return value
    named = value if isinstance(value, dict) else {t["name"]: t["template"] for t in value}
    if "default" not in named:
        raise DataError(
            f"{config_file} has the chat templates {', '.join(map(repr, sorted(named)))}, but "
            f'none named "default", which is the one that is used. Rename one of them, or add '
            f"chat_template.jinja to that folder."
        )
    return named["default"]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
