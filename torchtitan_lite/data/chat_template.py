"""The chat template of a tokenizer, which renders a conversation as one text.

Finds and renders templates. Invariants: the rendered text equals that of `apply_chat_template` of
transformers, so that training and inference use the same prompts; it depends on the files and the
rows only, not on the date; and a template runs in Jinja's sandbox, without access to files or
Python's internals. `jinja2` is imported when a template is compiled, so that a start with a warm
token cache does not import it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.tokenizer_folder import (
    CONFIG,
    named_tokens,
    read_tokenizer_config,
)

END_OF_TURN = "<|eot_id|>"
TURN_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", END_OF_TURN)
"""Special tokens of `DEFAULT_TEMPLATE`."""

DEFAULT_TEMPLATE = """\
{%- macro text_of(message) %}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- text_of(message) | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- text_of(message) | trim + '<|eot_id|>' }}
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

_SPAN_BEGIN, _SPAN_END = "\U0010f5b0", "\U0010f5b1"
"""Private-use characters; `ChatTemplate.render_with_spans` checks that a text does not contain
them."""

Messages = Sequence[Mapping[str, Any]]
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, in the order in which transformers takes them."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template that is not compiled yet."""

    name: str
    """Its file, for messages."""
    source: str
    special_tokens: Mapping[str, str]
    """Special tokens by name: `bos_token`, `eos_token` and so on."""
    with_tools: "ChatTemplate | None" = None
    """The template named "tool_use", for conversations with tools."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that changes if the rendered text may have changed."""
        parts = [self.source, json.dumps(dict(self.special_tokens), sort_keys=True), str(TODAY)]
        parts += [] if self.with_tools is None else [self.with_tools.fingerprint]
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()

    def chosen(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """Return the template for a conversation with these variables."""
        return self if self.with_tools is None or "tools" not in variables else self.with_tools

    @property
    def variables(self) -> frozenset[str]:
        """Return the names that the template reads beside the messages and special tokens, such as
        `tools` and `enable_thinking`."""
        own = self._compiled.variables - {"messages", "add_generation_prompt", *self.special_tokens}
        return own if self.with_tools is None else own | self.with_tools.variables

    @property
    def has_generation_blocks(self) -> bool:
        """Whether `{% generation %}` blocks mark the assistant's text."""
        return self._compiled.generation.is_used

    def render(
        self,
        messages: Messages,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation with `variables`; `add_generation_prompt` appends the header of the
        assistant's next message. Raises TemplateRejection."""
        template = self._compiled.template
        inputs = {"tools": None, "documents": None, **self.special_tokens, **variables}
        inputs |= {
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(inputs)
        # A template is a program: besides Jinja's errors, any expression may raise.
        except Exception as error:
            raise TemplateRejection(f"{type(error).__name__}: {error}") from error

    def render_with_spans(
        self, messages: Messages, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and return the character ranges [begin, end) of its `{% generation
        %}` blocks. Raises TemplateRejection."""
        plain = self.render(messages, variables)
        generation = self._compiled.generation
        generation.marks = (_SPAN_BEGIN, _SPAN_END)
        try:
            marked = self.render(messages, variables)
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

    def take_undefined(self) -> set[str]:
        """Return the undefined values that the template wrote, as nothing, since the last call."""
        written = self._compiled.undefined
        taken = set(written)
        written.clear()
        return taken

    @cached_property
    def _compiled(self) -> Any:
        from torchtitan_lite.data.template_environment import compile_template

        return compile_template(self.name, self.source, TODAY)


class TemplateRejection(Exception):
    """The template rejects a conversation; the text says why."""


def find_template(folder: Path) -> ChatTemplate:
    """Find the template of the tokenizer in `folder`: chat_template.jinja and the files in
    additional_chat_templates, else `chat_template` in tokenizer_config.json. Raises DataError if
    there is none."""
    config, config_file = read_tokenizer_config(folder), folder / CONFIG
    named = _in_files(folder) or _in_config(config.get("chat_template"), config_file)
    if not named:
        raise DataError(
            f"the tokenizer in {folder} has no chat template, which a chat (a corpus with "
            f"messages_column, or --chat) needs. Add chat_template.jinja to that folder (the "
            f"template of the model's chat version, which then has the tokens that it uses), or "
            f'"chat_template" to tokenizer_config.json.'
        )
    if "default" not in named:
        raise DataError(
            f"the tokenizer in {folder} has the chat templates "
            f'{", ".join(map(repr, sorted(named)))}, but none named "default", which conversations '
            f"without tools use. Rename one of them, or add chat_template.jinja to that folder."
        )
    special_tokens = named_tokens(config)
    templates = {
        kind: ChatTemplate(name=name, source=source, special_tokens=special_tokens)
        for kind, (name, source) in named.items()
    }
    return replace(templates["default"], with_tools=templates.get("tool_use"))


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose reasoning has the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _in_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Return file and source of the templates in files, by name."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    return {
        name: (str(file), file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.is_file()
    }


def _in_config(value: Any, config_file: Path) -> dict[str, tuple[str, str]]:
    """Return the same of the templates in tokenizer_config.json: a text, or several by name."""
    if value is None:
        return {}
    try:
        named = {"default": value} if isinstance(value, str) else value
        named = named if isinstance(named, dict) else {t["name"]: t["template"] for t in named}
    except (TypeError, KeyError) as error:
        raise DataError(
            f'"chat_template" in {config_file} is neither a text nor a list of templates with '
            f"name and template ({type(error).__name__}: {error})."
        ) from error
    return {name: (str(config_file), source) for name, source in named.items()}
