"""Whether this process can still open a connection. Layer: imports errors only.

Without, each attempt at one with other replicas would be made again and again until its time limit.
"""

import os

from torchtitan_lite.errors import ReplicaError

_NEEDED = 8
"""For the connections to one other replica, and to the store where it is found."""


def check_descriptors() -> None:
    """Raises ReplicaError where there is no place for a few more."""
    opened = []
    try:
        for _ in range(_NEEDED):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise ReplicaError(
            f"This process cannot connect with the replicas that were found: {error.strerror}. It "
            "leaves, to be started again. Raise the limit of open files (ulimit -n), if that is it."
        ) from None
    finally:
        for one in opened:
            os.close(one)
