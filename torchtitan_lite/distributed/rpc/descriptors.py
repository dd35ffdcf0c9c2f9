"""File descriptors of this process: their limit, and a reserve that servers leave to training."""

import resource
from contextlib import suppress

_RESERVE = 128
"""Descriptors that connections of strangers leave for files, sockets and pipes of training."""


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process to the highest that it may set: a server needs
    descriptors for each client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leaves_reserve(descriptor: int) -> bool:
    """Return whether the process has its reserve after it has opened `descriptor`: the kernel
    assigns the lowest free number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or descriptor < soft - min(_RESERVE, soft // 4)
