"""`python -m torchtitan_lite.config 1,2 -- ARGUMENTS`: check a config for replicas of each of these
numbers of ranks.

The launcher runs it before it starts anything, because the launcher does not import torch.
"""

import sys
from collections.abc import Sequence

from torchtitan_lite.config.compatibility import check_rank_counts
from torchtitan_lite.config.loading import parse_command_line
from torchtitan_lite.core.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    try:
        config, _ = parse_command_line(argv[2:])
        check_rank_counts(config, [int(number) for number in argv[0].split(",")])
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
