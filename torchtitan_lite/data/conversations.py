"""Reading and checking the conversations of a chat corpus."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.documents import missing_column
from torchtitan_lite.data.row_files import RepeatedKeys, kind_of
from torchtitan_lite.data.tool_calls import argument_problem
from torchtitan_lite.data.unusable_rows import UnusableRows

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "ipython", "function")
_LISTS = ("tools", "documents")
"""Columns with a list of objects, which transformers passes to every template."""
_MORE_VARIABLES = "chat_template_kwargs"
"""Column with further variables of the template, as TRL names it."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One example."""

    place: str
    """File and line, or row; for messages."""
    messages: list[dict[str, Any]]
    """The messages as given, without null values."""
    text: str
    """Return the messages as JSON, which decides whether the conversation is held out, independent
    of template and tokenizer."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that the row gives, such as `tools`."""

    def message_texts(self) -> Iterator[str]:
        """Return the texts of the messages, to train a tokenizer."""
        for message in self.messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            yield from (text for part in parts if isinstance(text := part.get("text"), str))


def read_conversations(
    corpus: Corpus, unusable: UnusableRows, variables: Collection[str] = ()
) -> Iterator[Conversation]:
    """Yield the conversations of `corpus` in order, each with `tools`, `documents`, the entries of
    `chat_template_kwargs` and the columns `variables` of its row. Those that cannot be used are
    added to `unusable`. Raises DataError for a file that cannot be read."""
    names = {*_LISTS, _MORE_VARIABLES, *variables} - {corpus.column}
    for row in corpus.rows([corpus.column, *names]).rows:
        unusable.num_rows += 1
        if row.damage:
            unusable.add(row.place, row.damage, is_damage=True)
        elif corpus.column not in row.values:
            unusable.add(row.place, missing_column(row, corpus.column))
        else:
            # All rows of a table have all keys that any row has.
            values = _without_nulls(row.values) if row.columns else row.values
            conversation = _conversation(row.place, values, corpus.column, names)
            if isinstance(conversation, str):
                unusable.add(row.place, conversation)
            else:
                yield conversation


def _conversation(
    place: str, values: Mapping[str, Any], column: str, names: Collection[str]
) -> Conversation | str:
    """Return the conversation of a row, or why there is none."""
    messages: Any = values.get(column)
    problem = _problem_of(messages)
    if problem is not None:
        return problem
    if isinstance(values, RepeatedKeys) and column in values.repeated:
        return f"{column!r} is given several times, with different values"
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        variables = _variables(values, names)
        text = json.dumps(messages, ensure_ascii=False, sort_keys=True)
        (text + json.dumps(variables, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        return f"it contains an unpaired surrogate ({error.reason})"
    except TypeError as error:
        return f"it contains a value that is not valid JSON ({error})"
    except ValueError as error:
        return str(error)
    return Conversation(place=place, messages=messages, text=text, variables=variables)


def _variables(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the template's variables in a row. Raises ValueError."""
    variables = {name: values[name] for name in names if values.get(name) is not None}
    more = _parsed(_MORE_VARIABLES, variables.pop(_MORE_VARIABLES, {}))
    if not isinstance(more, dict):
        raise ValueError(f"{_MORE_VARIABLES} is {kind_of(more)}, not an object")
    variables |= more
    for name in _LISTS:
        listed = _parsed(name, variables.pop(name, None))
        if listed is None:
            continue
        if not isinstance(listed, list):
            raise ValueError(f"{name} is {kind_of(listed)}, not a list")
        variables[name] = [_parsed(name, element) for element in listed]
        for element in variables[name]:
            if not isinstance(element, dict):
                raise ValueError(f"{name} contains {kind_of(element)}, not only objects")
    return variables


def _parsed(name: str, value: Any) -> Any:
    """Return the value of JSON text, or `value`."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None if name in _LISTS else {}
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{name} is text that is not JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value


def _problem_of(messages: Any) -> str | None:
    """Return the problem of an example's messages."""
    if not isinstance(messages, list):
        return f"the messages are {kind_of(messages)}, not a list"
    if not messages:
        return "it has no messages"
    for number, message in enumerate(messages, start=1):
        problem = _problem_of_message(message)
        if problem is not None:
            return f"message {number} {problem}"
    return None


def _problem_of_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {kind_of(message)}, not an object with role and content"
    if isinstance(message, RepeatedKeys) and message.repeated:
        return f"gives {', '.join(sorted(message.repeated))} several times, with different values"
    if message.get("weight") not in (None, 0, 1):
        return f"has the weight {message['weight']!r}, which may be 0 or 1"
    role, content = message.get("role"), message.get("content")
    if role is None:
        keys = ", ".join(map(repr, message)) or "none"
        return f"has no role; its keys are {keys}"
    if role not in ROLES:
        return f"has the role {role!r}; known are {', '.join(ROLES)}"
    if content is None and not message.get("tool_calls"):
        return "has no content"
    if isinstance(content, list):
        wrong = [part for part in content if not isinstance(part, dict)]
        if wrong:
            return f"has {kind_of(wrong[0])} among the parts of its content"
    elif content is not None and not isinstance(content, str):
        return f"has {kind_of(content)} as its content, which is a text or a list of parts"
    return argument_problem(message)
