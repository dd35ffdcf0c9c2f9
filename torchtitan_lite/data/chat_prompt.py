"""Prompts of a chat: messages in the template's form, up to the beginning of the answer. Layer:
above chat_tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.data.chat_template import ChatTemplate, Messages, TemplateRejection
from torchtitan_lite.data.conversations import ASSISTANT, Unusable, read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError
from torchtitan_lite.schema.data import CorpusConfig

_ANSWER = "answer"
"""Stands for the assistant's text where the end of its turn is looked for."""


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt that the assistant is to answer."""

    messages: Messages
    ids: Sequence[int]
    """With special tokens, as in training: nothing is to be added."""
    stop_ids: frozenset[int]
    """The token that ends the assistant's turn; empty if the template has none."""


def chat_prompt(tokenizer: Tokenizer, template: ChatTemplate, messages: Messages) -> ChatPrompt:
    """Return the prompt of `messages`. Raises DataError if the template rejects them."""
    try:
        text = template.render(messages, add_generation_prompt=True)
        through = template.render([*messages, {"role": ASSISTANT, "content": _ANSWER}])
    except TemplateRejection as rejection:
        raise DataError(f"{template.name} rejects the messages: {rejection}") from None
    behind = through.rpartition(_ANSWER)[2]
    ends = [one for one in tokenizer.special_texts if behind.startswith(one)]
    ids, *end = (ids.tolist() for ids, _, _ in tokenizer.encode_rendered([text, *ends]))
    return ChatPrompt(messages, ids, frozenset(one[0] for one in end if len(one) == 1))


def first_question(corpora: Sequence[CorpusConfig], cache_folder: Path) -> Messages | None:
    """Return the messages before the first answer in the first chat corpus; None without one.
    Raises DataError if it cannot be read."""
    for config in corpora:
        if config.messages_column is None:
            continue
        corpus = open_corpus(config, cache_folder)
        for conversation in read_conversations(corpus, Unusable(corpus)):
            messages = conversation.messages
            roles = [message["role"] for message in messages]
            if ASSISTANT in roles[1:]:
                return messages[: roles.index(ASSISTANT, 1)]
    return None
