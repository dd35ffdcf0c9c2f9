"""Prompts of a chat: messages in the template's form, up to the beginning of the answer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.chat_template import ChatTemplate, Messages, TemplateRejection
from torchtitan_lite.data.conversations import ASSISTANT, read_conversations
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.unusable_rows import UnusableRows

_ANSWER = "answer"
"""Stands for the assistant's text where the end of its turn is looked for."""


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt that the assistant is to answer."""

    messages: Messages
    ids: Sequence[int]
    """Ids with the special tokens, as in training: nothing is to be added."""
    stop_ids: frozenset[int]
    """The token that ends the assistant's turn; empty if the template has none."""


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Messages,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> ChatPrompt:
    """Return the prompt of `messages`, rendered with `variables` of the template, such as `tools`.
    Raises DataError if the template rejects them."""
    chosen = template.chosen(variables)
    answer = {"role": ASSISTANT, "content": _ANSWER}
    try:
        text = chosen.render(messages, variables, add_generation_prompt=True)
        through = chosen.render([*messages, answer], variables)
    except TemplateRejection as rejection:
        raise DataError(f"{chosen.name} rejects the messages: {rejection}") from None
    behind = through.rpartition(_ANSWER)[2]
    ends = [
        special_text for special_text in tokenizer.special_texts if behind.startswith(special_text)
    ]
    ids, *end = (ids.tolist() for ids, _, _ in tokenizer.encode_rendered([text, *ends]))
    return ChatPrompt(messages, ids, frozenset(end_ids[0] for end_ids in end if len(end_ids) == 1))


def first_question(
    tokenizer: Tokenizer, template: ChatTemplate, corpora: Sequence[CorpusConfig]
) -> ChatPrompt | None:
    """Return the prompt of the first conversation with an answer, of the first chat corpus with
    one that `template` accepts, up to its first answer and with the columns of its row that the
    template reads; None without one. Raises DataError if a corpus cannot be read."""
    for config in corpora:
        if config.messages_column is None:
            continue
        corpus = open_corpus(config)
        # Unusable rows are reported where the corpus is tokenized.
        unusable = UnusableRows(corpus)
        for conversation in read_conversations(corpus, unusable, template.variables):
            roles = [message["role"] for message in conversation.messages]
            if ASSISTANT not in roles[1:]:
                continue
            question = conversation.messages[: roles.index(ASSISTANT, 1)]
            with suppress(DataError):
                return chat_prompt(tokenizer, template, question, conversation.variables)
    return None
