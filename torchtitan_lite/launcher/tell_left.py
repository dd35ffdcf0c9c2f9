"""`python -m torchtitan_lite.launcher.tell_left HOST:PORT`: tells the lighthouse there of replicas
that have left, whose names come in on standard input, a line each. Layer: above lighthouse.

TORCHTITAN_LITE_TOKEN is the secret by which the lighthouse believes it.
"""

import os
import sys

from torchtitan_lite.errors import UserError
from torchtitan_lite.lighthouse.client import tell_left

_TIMEOUT_S = 2.0


def main(address: str) -> int:
    """Tell until the names end, and return the exit status."""
    token = os.environ.get("TORCHTITAN_LITE_TOKEN", "")
    for line in sys.stdin:
        try:
            tell_left(address, line.strip(), token, _TIMEOUT_S)
        except UserError as error:
            # The lighthouse finds out by itself, only later.
            print(error, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
