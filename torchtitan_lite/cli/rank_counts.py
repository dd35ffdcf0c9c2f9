"""`python -m torchtitan_lite.cli.rank_counts 1,2 -- ARGUMENTS`: check a config for
replicas of each of these numbers of ranks, and print why they cannot move from one to another in
their processes, as JSON: `{"refusal": TEXT}`, with an empty text if they can.

The launcher runs it before it starts anything, because the launcher does not import torch.
"""

import sys
from collections.abc import Sequence

from torchtitan_lite.cli.resize_check import print_refusal
from torchtitan_lite.config import Config, check_live_resize
from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.resize import resize_problems
from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import parse_command_line


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    try:
        config, _ = parse_command_line(argv[2:])
        check_rank_counts(config, [int(number) for number in argv[0].split(",")])
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print_refusal(lambda: check_live_resize(config, config, is_joint=True))
    return 0


def check_rank_counts(config: Config, numbers: Sequence[int]) -> None:
    """Raise ConfigError with every problem unless replicas can run on, and switch between, any of
    these numbers of ranks."""
    if len(numbers) == 1:
        check_against(config, numbers[0])
        return
    problems = list(
        resize_problems(
            config,
            "Replicas that may have another number of ranks (--nproc-per-replica with several)",
        )
    )
    for number in numbers:
        try:
            check_against(config, number)
        except ConfigError as error:
            problems.append(f"With {number} rank{'s' if number > 1 else ''} each: {error}")
    if problems:
        raise config_error(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
