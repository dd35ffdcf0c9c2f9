"""The arguments of tool calls, as objects or as JSON text.

Most templates, such as those of Qwen and Llama, write the arguments as JSON themselves, so they
need objects, and a text would be quoted once more. OpenAI's form has JSON text, which a few
templates, such as DeepSeek's, append to other text.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def argument_forms(messages: Messages) -> Iterator[Messages]:
    """Yield the conversation with all arguments as objects; if it has any, also with all as JSON
    text. The texts are those that `argument_problem` accepts."""
    yield _converted(messages, _as_object)
    if any(_functions(message) for message in messages):
        yield _converted(messages, _as_text)


def argument_problem(message: Mapping[str, Any]) -> str | None:
    """Return the problem of the arguments in a message, if a text is no JSON object."""
    for number, function in enumerate(_functions(message), start=1):
        try:
            value = _as_object(function["arguments"])
        except ValueError as error:
            return f"has text that is not JSON as the arguments of tool call {number} ({error})"
        if not isinstance(value, dict):
            return f"has JSON that is no object as the arguments of tool call {number}"
    return None


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the functions that a message calls with arguments."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [_function(call) for call in calls if isinstance(call, Mapping)]
    return [function for function in functions if function.get("arguments") is not None]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _converted(messages: Messages, convert: Callable[[Any], Any]) -> Messages:
    def converted(message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not _functions(message):
            return message
        calls = [_converted_call(call, convert) for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}

    return [converted(message) for message in messages]


def _converted_call(call: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = _function(call)
    if function.get("arguments") is None:
        return call
    function = {**function, "arguments": convert(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _as_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # OpenAI's form of a call without arguments.
    return json.loads(value) if value.strip() else {}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
