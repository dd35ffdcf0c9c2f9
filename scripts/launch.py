"""`torchtitan-lite launch` in a checkout."""

import sys

from torchtitan_lite.cli import main
from torchtitan_lite.leaving import leave

if __name__ == "__main__":
    leave(main(["launch", *sys.argv[1:]]))
