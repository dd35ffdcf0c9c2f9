"""`python -m torchtitan_lite.config.other_ranks 1,2 -- ARGUMENTS`: checks a configuration for
replicas of each of these numbers of ranks. Layer: above command_line and constraints.

The launcher runs it before it starts anything; it does not import torch itself.
"""

import sys
from collections.abc import Iterator, Sequence

from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.config.loading import parse_command_line
from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import ConfigError, UserError


def check_other_ranks(config: Config, numbers: Sequence[int]) -> None:
    """Raise ConfigError with every problem unless replicas can run on, and switch between, any of
    these numbers of ranks."""
    if len(numbers) == 1:
        check_against(config, numbers[0])
        return
    problems = list(_resize_problems(config))
    for number in numbers:
        try:
            check_against(config, number)
        except ConfigError as error:
            problems.append(f"With {number} rank{'s' if number > 1 else ''} each: {error}")
    if problems:
        raise config_error(problems)


def _resize_problems(config: Config) -> Iterator[str]:
    given = "Replicas that may have another number of ranks (--nproc-per-replica with several)"
    if config.training.global_batch_size == -1:
        yield (
            f"{given} need steps that do not depend on it, and training.global_batch_size = -1 "
            "follows the mesh. Set it to the samples of a step."
        )
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        yield (
            f"{given} go on from what they have saved. Set checkpoint.enable = true, without "
            "load_only."
        )
    if checkpoint.load_step >= 0 or checkpoint.exclude_from_loading:
        yield (
            f"{given} begin again from their newest state, and checkpoint.load_step or "
            "exclude_from_loading asks for another. Start the run with it once, with one number of "
            "ranks, then without."
        )


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    try:
        config, _ = parse_command_line(argv[2:])
        check_other_ranks(config, [int(number) for number in argv[0].split(",")])
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
