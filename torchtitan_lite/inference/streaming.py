"""Text as it comes, a token at a time. Layer: above data."""

from typing import TextIO

from torchtitan_lite.data import Tokenizer

_INCOMPLETE = "\ufffd"
"""What bytes decode to that are not yet a character."""


class TextStream:
    """Writes what tokens add to a text once it is sure: a character may have several tokens, and
    how a token decodes may depend on the one before."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO) -> None:
        self._tokenizer, self._out = tokenizer, out
        self._ids: list[int] = []
        """Of the line so far, and the one before it."""
        self._written = 0
        """Characters of their text."""

    def take(self, token: int) -> None:
        """One more token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE):
            return
        self._write(text)
        if text.endswith("\n"):
            # Else each token would take longer than the one before.
            self._ids = [token]
            self._written = len(self._tokenizer.decode(self._ids))

    def close(self) -> None:
        """The text is at its end: write what was held back."""
        self._write(self._tokenizer.decode(self._ids))

    def _write(self, text: str) -> None:
        self._out.write(text[self._written :])
        self._out.flush()
        self._written = len(text)
