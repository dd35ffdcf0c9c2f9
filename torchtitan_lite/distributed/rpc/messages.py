"""Names and encoding that server and client share."""

import json
from typing import Any

HELLO = "Hello"
"""Call that opens a session."""
AUTHORIZATION = "authorization"
"""Metadata of a request: its proof."""
PROOF = "proof"
"""Trailing metadata of a response: its MAC."""

RESULT, ERROR, MESSAGE = "result", "error", "message"
"""Keys of a response: what the call returned, or the name of a gRPC status and the reason."""


def method_of(service: str, call: str) -> str:
    """Return the gRPC method of a call."""
    return f"/{service}/{call}"


def encode(content: dict[str, Any]) -> bytes:
    """Return an object as JSON."""
    return json.dumps(content, separators=(",", ":")).encode()


def decode(content: bytes) -> dict[str, Any]:
    """Parse an object. Raises ValueError."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The message is not JSON: {error!r:.100}") from None
    if not isinstance(message, dict):
        raise ValueError("The message is not an object.")
    return message
