"""`torchtitan-lite convert from-dcp` in a checkout."""

import sys

from torchtitan_lite.cli import main
from torchtitan_lite.leaving import leave

if __name__ == "__main__":
    leave(main(["convert", "from-dcp", *sys.argv[1:]]))
