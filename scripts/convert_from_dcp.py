"""`torchtitan-lite convert from-dcp` in a checkout."""

import sys

from torchtitan_lite.cli import main
from torchtitan_lite.core.process_exit import exit_process

if __name__ == "__main__":
    exit_process(main(["convert", "from-dcp", *sys.argv[1:]]))
