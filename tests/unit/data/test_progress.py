"""Progress before the first step: a bar in a terminal, else log lines."""

import io
import logging
import re
import sys

import pytest

from torchtitan_lite.data import progress as module
from torchtitan_lite.data.progress import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_in_a_terminal_shows_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    with progress("Tokenizing the text", "documents") as advance:
        advance(1, 1_000)
        advance(2, 234)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"Tokenizing the text ━{24} 0 documents, 0 tokens", shown)
    assert re.search(r"Tokenizing the text ━{24} 3 documents, 1,234 tokens", shown)
    # The bar is erased at its end.
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_log_lines_at_intervals_show_the_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(logging.getLogger("torchtitan_lite"), "propagate", True)
    with caplog.at_level(logging.INFO), progress("Tokenizing the text", "documents") as advance:
        advance(1, 1_000)
        for now_s in (10.0, 19.0, 20.0):  # noqa: B007
            advance(2, 100)
    assert caplog.messages == [
        "Tokenizing the text",
        "Tokenizing the text: 3 documents, 1,100 tokens",
        "Tokenizing the text: 7 documents, 1,300 tokens",
    ]
