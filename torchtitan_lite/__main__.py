"""`python -m torchtitan_lite`, and the console command `torchtitan-lite`."""

import sys
from typing import NoReturn

from torchtitan_lite.core.rank.supervised import attach_to_launcher


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    # Before the imports, which take a second in which the launcher may die.
    attach_to_launcher()
    from torchtitan_lite import cli
    from torchtitan_lite.core.process_exit import exit_process

    exit_process(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
