"""`torchtitan-lite convert to-dcp` in a checkout."""

import sys

from torchtitan_lite.cli import main
from torchtitan_lite.leaving import leave

if __name__ == "__main__":
    leave(main(["convert", "to-dcp", *sys.argv[1:]]))
