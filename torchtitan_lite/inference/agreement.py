"""Errors of one rank that all ranks raise. Layer: above errors and messages."""

from collections.abc import Callable
from typing import TypeVar

from torchtitan_lite.errors import UserError
from torchtitan_lite.messages import gather_texts

_Made = TypeVar("_Made")


def everywhere(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make`. If it fails on some rank (a machine may not see all files),
    every rank raises: its own error, or a UserError with those of others. Every rank must call it.
    """
    try:
        made, problem = make(), None
    except (UserError, OSError) as error:
        made, problem = None, error
    told = gather_texts(b"" if problem is None else (str(problem) or repr(problem)).encode())
    if problem is not None:
        raise problem
    others = dict.fromkeys(text.decode() for text in told if text)
    if others:
        raise UserError(" ".join(others))
    assert made is not None
    return made
