"""Parsing of fields that arrive unauthenticated: headers, metadata and reasons.

Invariant: whatever a peer sends, `parse_field` returns the groups of the field's pattern or raises
RpcError. The patterns accept ASCII only, so that `int` and `bytes.fromhex` of a group cannot fail.
"""

import re

from torchtitan_lite.core.errors import RpcError

NONCE_BYTES, TICKET_BYTES, MAC_BYTES = 16, 40, 32
NONCE, TICKET, MAC = (
    re.compile(f"([0-9a-f]{{{2 * length}}})") for length in (NONCE_BYTES, TICKET_BYTES, MAC_BYTES)
)
"""Patterns of what opens and proves a session, in hexadecimal."""
NUMBER = re.compile("([0-9]{1,18})")
PROOF = re.compile(rf"{NONCE.pattern}\.{TICKET.pattern}\.{NUMBER.pattern}\.{MAC.pattern}")
"""Pattern of the proof of a request: nonce, ticket, counter and MAC."""
_MAX_SHOWN_CHARS = 200


def parse_field(name: str, value: object, pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Return the groups of `pattern` in the field `name`. Raises RpcError, and nothing else, if the
    value is missing, of another type or malformed."""
    match = pattern.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise RpcError(f"{name} is missing or malformed: {printable(value)!r}")
    return match.groups()


def printable(value: object) -> str:
    """Return the start of a text from a peer without what could control a terminal."""
    text = value if isinstance(value, str) else "" if value is None else repr(value)
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN_CHARS])
