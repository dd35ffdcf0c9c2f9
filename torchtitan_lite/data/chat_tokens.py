"""Conversations as token ids, with the assistant's tokens as targets.

The ids are those of one tokenization of the entire text, as at inference; whether a token is a
target follows from the position of its characters.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.chat_template import ChatTemplate, TemplateRejection
from torchtitan_lite.data.conversations import ASSISTANT, Conversation
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.tool_calls import Messages, argument_forms
from torchtitan_lite.data.unusable_rows import UnusableRows


class ConversationTokens(NamedTuple):
    """A tokenized conversation."""

    conversation: Conversation
    ids: np.ndarray
    """uint32."""
    target_bounds: np.ndarray
    """int64, ascending: targets are the ids [b0, b1), [b2, b3) and so on; may be empty."""


def tokenize_conversations(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    conversations: Sequence[Conversation],
    unusable: UnusableRows,
) -> list[ConversationTokens]:
    """Tokenize conversations; those that the template rejects are added to `unusable`. Raises
    DataError if the template does not mark the assistant's text."""
    rendered = []
    for conversation in conversations:
        chosen = template.chosen(conversation.variables)
        try:
            text, spans = _rendered(tokenizer, chosen, conversation)
        except TemplateRejection as rejection:
            unusable.add(conversation.place, f"the template rejects it ({rejection})")
            continue
        finally:
            undefined = chosen.take_undefined()
        if any(_is_repeated_as_python(message, text) for message in conversation.messages):
            why = "the template writes a list of parts as Python text: join their texts"
            unusable.add(conversation.place, why)
            continue
        has_calls = any(message.get("tool_calls") for message in conversation.messages)
        if has_calls and "tool_calls" not in chosen.source:
            what = f"have tool calls, and {chosen.name} does not read them"
            unusable.remark(conversation.place, what)
        for name in sorted(undefined):
            unusable.remark(conversation.place, f"lack {name}, and {chosen.name} writes nothing")
        for name, value in conversation.variables.items():
            if value and name not in chosen.variables:
                unusable.remark(
                    conversation.place, f"have {name}, and {chosen.name} does not read it"
                )
        rendered.append((conversation, text, spans))
    encoded = tokenizer.encode_rendered([text for _, text, _ in rendered])
    return [
        ConversationTokens(conversation, ids, _token_bounds(begins, ends, spans))
        for (conversation, _, spans), (ids, begins, ends) in zip(rendered, encoded, strict=True)
    ]


def _is_repeated_as_python(message: Mapping[str, Any], text: str) -> bool:
    """Return whether the content of a message is a list, whose Python form is in the text."""
    content = message.get("content")
    return isinstance(content, list) and bool(content) and str(content) in text


def _rendered(
    tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the character ranges of the assistant, with the
    arguments of tool calls in the first form that the template accepts."""
    rejections = []
    for messages in argument_forms(conversation.messages):
        try:
            return _assistant_spans(tokenizer, template, conversation, messages)
        except TemplateRejection as rejection:
            rejections.append(rejection)
    raise rejections[0]


def _assistant_spans(
    tokenizer: Tokenizer, template: ChatTemplate, conversation: Conversation, messages: Messages
) -> tuple[str, list[tuple[int, int]]]:
    variables = conversation.variables
    weights = [m.get("weight") != 0 for m in messages if m["role"] == ASSISTANT]
    if template.has_generation_blocks:
        whole, blocks = template.render_with_spans(messages, variables)
        if not all(weights) and len(blocks) != len(weights):
            raise TemplateRejection(
                f"a message has the weight 0, but the template has {len(blocks)} generation blocks "
                f"for {len(weights)} assistant messages"
            )
        return whole, list(compress(blocks, weights)) if not all(weights) else blocks
    whole = template.render(messages, variables)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = template.render(messages[:place], variables, add_generation_prompt=True)
        through = template.render(messages[: place + 1], variables)
        if not (whole.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{template.name} does not show where message {place + 1} of {conversation.place} "
                f"begins and ends: the text of the first messages is not a prefix of the text of "
                f"all {len(messages)}, because the template renders earlier messages differently "
                f"if more follow. Put {{% generation %}} and {{% endgeneration %}} around the "
                f"assistant's text in the template, or remove such conversations."
            )
        if message.get("weight") == 0:
            continue
        spans.append((len(before), _end_of_turn(through, len(before), tokenizer.special_texts)))
    return whole, spans


def _end_of_turn(text: str, begin: int, special_texts: tuple[str, ...]) -> int:
    """Return the end of the assistant's text that begins at `begin`: with the token that ends the
    turn, without the line break that many templates add, which no model generates."""
    stripped = text[begin:].rstrip()
    return begin + len(stripped) if stripped.endswith(special_texts) else len(text)


def _token_bounds(
    begins: np.ndarray, ends: np.ndarray, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return the tokens that contain characters of `spans`, as ascending bounds. `begins` and
    `ends` are the characters of each token."""
    # The offsets may exclude the space before a word: extend the token to the previous one.
    ends = np.maximum.accumulate(ends)
    begins = np.minimum(begins, np.concatenate([[0], ends[:-1]]))
    bounds: list[int] = []
    for begin, end in spans:
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(begins, end, side="left"))
        # A token may contain the end of one span and the beginning of the next.
        first = max(first, bounds[-1] if bounds else 0)
        if begin < end and first < last:
            bounds += [first, last]
    return np.array(bounds, dtype=np.int64)
