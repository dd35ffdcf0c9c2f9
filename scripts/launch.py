"""Train with several replicas on this machine, which come and go without ending the run.

python -m scripts.launch --replicas 2 --nproc-per-replica 2 -- --config configs/llama3_debug_ft.toml

What follows `--` is for train.py. Each replica is a torchrun of its own; one whose ranks die or
hang is started again while the others train on. With --nproc-per-replica 1:2 all go on with fewer
ranks each where one cannot have all. SIGTERM or Ctrl-C: all save and leave; a second Ctrl-C ends
them at once. The exit status is 0 when all replicas finished or left, 1 when one was given up or
had to be killed, and 2 where the command line is wrong.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from torchtitan_lite.errors import ConfigError, UserError
from torchtitan_lite.launcher import goodput
from torchtitan_lite.launcher.launcher import Launcher
from torchtitan_lite.launcher.plan import training_plan
from torchtitan_lite.launcher.sizes import parse_ranks
from torchtitan_lite.launcher.view import RecordedView, open_view

_TRAIN = Path(__file__).absolute().parent.parent / "train.py"


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    own, arguments = _split(argv)
    try:
        options = _parser().parse_args(own)
        _check(options)
        plan = training_plan(
            arguments,
            train=_TRAIN,
            num_replicas=options.replicas,
            ranks=options.nproc_per_replica,
            slots_file=options.slots_file,
            regrow_after_s=options.regrow_after_s,
            lighthouse=options.lighthouse,
            min_replicas=options.min_replicas,
            max_restarts=options.max_restarts,
            max_restart_delay_s=options.max_restart_delay_s,
            grace_s=options.grace_s,
            host=options.bind,
            log_dir=options.log_dir,
        )
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    launcher = Launcher(plan, RecordedView(open_view(), plan.events))
    try:
        status = launcher.run()
    except OSError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    for number in range(plan.num_replicas):
        told = goodput.in_words(plan.books(number))
        if told is not None:
            print(f"replica {number}: {told}")
    for failure in launcher.failures():
        print(failure, file=sys.stderr)
    return status


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError where this cannot work, or for numbers that make no sense."""
    if sys.platform != "linux":
        raise ConfigError(f"The launcher needs Linux, and this is {sys.platform}.")
    lowest = {"replicas": 1, "min_replicas": 1, "max_restarts": 0}
    others = {"grace_s": 0, "regrow_after_s": 0, "max_restart_delay_s": 0}
    for name, least in {**lowest, **others}.items():
        given = getattr(options, name)
        if given < least:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {given}, and has to be at least {least}.")
    if options.slots_file is not None and len(options.nproc_per_replica) == 1:
        raise ConfigError(
            "--slots-file changes nothing while replicas may have one number of processes only: "
            "give --nproc-per-replica several, such as 1:4."
        )
    if options.min_replicas > options.replicas:
        raise ConfigError(
            f"--min-replicas is {options.min_replicas} of {options.replicas} replicas, so that no "
            "step could ever be taken: lower it, or start more."
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like any other error."""
        raise UserError(f"{message}. --help shows how to call it.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scripts.launch",
        description="Train with several replicas on this machine, which come and go without ending "
        "the run.",
        epilog="What follows -- is for train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", type=int, required=True, help="how many")
    parser.add_argument(
        "--nproc-per-replica",
        type=parse_ranks,
        default=(1,),
        metavar="RANKS",
        help="processes of each replica (default 1); 1:4 (from 1 to 4) or 1,2,4: as many of these "
        "as every replica can have, all the same number, which changes when that does",
    )
    parser.add_argument(
        "--slots-file",
        type=Path,
        metavar="FILE",
        help='says for how many processes each replica has place now, as {"0": 2, "1": 1}, and may '
        "change at any time",
    )
    parser.add_argument(
        "--regrow-after-s",
        type=float,
        default=600.0,
        help="a process that died three times in a row is done without for so long, where "
        "--nproc-per-replica allows it, then tried again; longer each time (default 600)",
    )
    parser.add_argument(
        "--lighthouse",
        choices=("builtin", "torchft"),
        default="builtin",
        help="by which the replicas find each other (default builtin, which is told of a death "
        "at once)",
    )
    parser.add_argument(
        "--min-replicas", type=int, default=1, help="no quorum without so many (default 1)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=10, help="of a replica, in a row (default 10)"
    )
    parser.add_argument(
        "--max-restart-delay-s",
        type=float,
        default=30.0,
        help="between two attempts at a replica, which doubles up to it (default 30)",
    )
    parser.add_argument(
        "--log-dir", type=Path, help="default: launch_logs in job.dump_folder of the run"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        help="address of this machine at which the lighthouse listens (default 127.0.0.1)",
    )
    parser.add_argument(
        "--grace-s", type=float, default=30.0, help="time to save and leave (default 30)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
