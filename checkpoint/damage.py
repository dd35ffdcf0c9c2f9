"""What is damage, and what may be well later. Layer: imports errors only."""

import errno

from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, DamagedSnapshot

_KINDS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NUMBERS = (errno.ELOOP, errno.EIO, errno.ENODATA)
"""What a file says that is missing, is something else, is shorter than it was, or lies on a part of
a disk that is broken. All else (a network that is down, too many open files) is no reason to go on
from an older checkpoint."""


def is_damage(error: BaseException) -> bool:
    """Whether `error` says that what was saved is not there any more."""
    if isinstance(error, OSError):
        # Clients of object stores give no numbers.
        return isinstance(error, _KINDS) or error.errno in _NUMBERS
    return isinstance(error, (DamagedCheckpoint, DamagedSnapshot))


def unreadable(message: str, error: OSError) -> CheckpointError:
    """What to raise where `error` was met: DamagedCheckpoint for damage, else CheckpointError, with
    both texts."""
    kind = DamagedCheckpoint if is_damage(error) else CheckpointError
    return kind(f"{message}: {error}")
