"""`torchtitan-lite convert from-hf` in a checkout."""

import sys

from torchtitan_lite.cli import main
from torchtitan_lite.leaving import leave

if __name__ == "__main__":
    leave(main(["convert", "from-hf", *sys.argv[1:]]))
