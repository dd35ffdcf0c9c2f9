"""Keeps torchft's compiled half from writing eight lines a step. Layer: imports nothing of the
project.

It writes to the standard error itself, at a level that nothing sets (torchft 0.2.0). So what this
process writes there goes through a filter: a process of its own, that still passes on the last
words of a process that dies.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHATTER = r"\[INFO\] \[torchft::"
_END_S = 1.0
"""For the filter to pass on the rest. It lives on with a process that was started meanwhile."""


@contextmanager
def without_chatter() -> Iterator[None]:
    """Drop such lines until the end of the block. Where there is no grep, they stay."""
    grep = shutil.which("grep")
    if grep is None:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    # A session of its own: a Ctrl-C that ends the trainer in time must not end it first.
    filter_ = subprocess.Popen(
        [grep, "--line-buffered", "-v", "-a", _CHATTER],
        stdin=subprocess.PIPE,
        stdout=before,
        start_new_session=True,
    )
    assert filter_.stdin is not None
    os.dup2(filter_.stdin.fileno(), 2)
    filter_.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        with suppress(subprocess.TimeoutExpired):
            filter_.wait(_END_S)
