"""Reading and checking the conversations of a chat corpus. All problems are reported at once, each
with its position. Layer: above corpus."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.file_problems import DECOMPRESSION_ERRORS
from torchtitan_lite.errors import DataError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "ipython", "function")
_LISTED = 20
"""Maximum problems listed in an error; the rest is counted."""


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

    def message_texts(self) -> Iterator[str]:
        """Return the texts of the messages, to train a tokenizer."""
        for message in self.messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            yield from (text for part in parts if isinstance(text := part.get("text"), str))


class Unusable:
    """Unusable conversations, reported together."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._problems: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, place: str, why: str) -> None:
        """Add one, at `place`."""
        self._count += 1
        if self._count <= _LISTED:
            self._problems.append(f"  {place}: {why}")

    def check(self) -> None:
        """Raise DataError if there are any."""
        if self._count == 0:
            return
        more = self._count - len(self._problems)
        listed = "\n".join(self._problems + ([f"  and {more} more"] if more else []))
        few = "1 conversation" if self._count == 1 else f"{self._count} conversations"
        raise DataError(
            f"{few} of {self._corpus.name} cannot be used:\n{listed}\n"
            f'Mend or remove them. A conversation is {{"{self._corpus.column}": [{{"role": "user", '
            f'"content": "..."}}, {{"role": "assistant", "content": "..."}}, ...]}}.'
        )


def read_conversations(corpus: Corpus, unusable: Unusable) -> Iterator[Conversation]:
    """Yield the conversations of `corpus` in order. Invalid ones are added to `unusable`; after the
    first of them the rest is only checked."""
    for place, value in _values(corpus, unusable):
        problem = _problem_of(value)
        if problem is not None:
            unusable.add(place, problem)
            continue
        # Columns of a table have all keys that any message has.
        messages = [{k: v for k, v in message.items() if v is not None} for message in value]
        try:
            text = json.dumps(messages, ensure_ascii=False, sort_keys=True)
            text.encode()
        except UnicodeEncodeError as error:
            unusable.add(place, f"it contains an unpaired surrogate ({error.reason})")
            continue
        except (TypeError, ValueError) as error:
            unusable.add(place, f"it contains a value that is not valid JSON ({error})")
            continue
        if not unusable:
            yield Conversation(place=place, messages=messages, text=text)


def _values(corpus: Corpus, unusable: Unusable) -> Iterator[tuple[str, Any]]:
    """Yield the values of the messages column with their positions."""
    if corpus.format != "json":
        for number, value in enumerate(corpus.values(), start=1):
            yield f"row {number}", value
        return
    # Not read by `datasets`, which reports neither all invalid lines nor their positions.
    corpus.check_not_empty()
    for file in corpus.files:
        for place, text in _examples(file):
            if text == b"":
                unusable.add(place, "an empty line")
                continue
            try:
                example = json.loads(text) if isinstance(text, bytes) else text
            except json.JSONDecodeError as error:
                unusable.add(place, f"not JSON ({error.msg}, column {error.colno})")
                continue
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                unusable.add(place, f"not UTF-8 (byte 0x{byte:02x}, column {error.start + 1})")
                continue
            except (ValueError, RecursionError) as error:
                unusable.add(place, f"not JSON ({error})")
                continue
            if not isinstance(example, dict) or corpus.column not in example:
                unusable.add(place, _no_messages(example, corpus.column))
                continue
            yield place, example[corpus.column]


def _examples(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the lines of a file as bytes, or the values of a single JSON list."""
    # Imported here, because a start with a warm token cache does not need it.
    import fsspec

    try:
        opened: Any = fsspec.open(str(file), "rb", compression="infer")
        with opened as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith(b"["):
                    values = json.loads(line + lines.read())
                    yield from ((f"{file}, item {n}", one) for n, one in enumerate(values, start=1))
                    return
                yield f"{file}:{number}", line.strip()
    except (*DECOMPRESSION_ERRORS, ValueError) as error:
        raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error


def _no_messages(example: Any, column: str) -> str:
    if not isinstance(example, dict):
        return f"not a JSON object but {_kind(example)}"
    keys = ", ".join(repr(key) for key in list(example)[:8]) or "none"
    return f"no key {column!r}; its keys are {keys}"


def _problem_of(messages: Any) -> str | None:
    """Return the problem of an example's messages."""
    if not isinstance(messages, list):
        return f"the messages are {_kind(messages)}, not a list"
    if not messages:
        return "it has no messages"
    for number, message in enumerate(messages, start=1):
        problem = _problem_of_message(message)
        if problem is not None:
            return f"message {number} {problem}"
    return None


def _problem_of_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {_kind(message)}, not an object with role and content"
    role, content = message.get("role"), message.get("content")
    if role is None:
        keys = ", ".join(map(repr, message)) or "none"
        return f"has no role; its keys are {keys}"
    if role not in ROLES:
        return f"has the role {role!r}; known are {', '.join(ROLES)}"
    if content is None and not message.get("tool_calls"):
        return "has no content"
    if isinstance(content, list):
        wrong = next((part for part in content if not isinstance(part, dict)), None)
        return None if wrong is None else f"has {_kind(wrong)} among the parts of its content"
    if content is not None and not isinstance(content, str):
        return f"has {_kind(content)} as its content, which is a text or a list of parts"
    return None


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")
