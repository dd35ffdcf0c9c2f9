"""The arguments of a replica, and the command that starts a run again as its user has started
it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.core.commands import program, torchtitan_lite
from torchtitan_lite.core.rank.processes import command_line
from torchtitan_lite.core.rank.supervised import names_torchrun

TRAIN_OPTIONS = "TORCHTITAN_LITE_TRAIN_OPTIONS"
"""Environment variable of ranks: the options of `train`, without --nproc, that started them."""
_REPLICA_OPTIONS = tuple(
    f"--fault_tolerance.{key}" for key in ("enable", "replica_id", "group_size")
)


def replica_arguments(replica: int, num_replicas: int) -> list[str]:
    """Return the arguments that make a run the replica of this number."""
    values = ("true", str(replica), str(num_replicas))
    return [word for pair in zip(_REPLICA_OPTIONS, values, strict=True) for word in pair]


def start_command(arguments: Sequence[str], world_size: int) -> list[str]:
    """Return the command line that starts this rank's run with `arguments` of `train`: with the
    options of the torchrun or the `train` that started the ranks, and with as many ranks as there
    are now."""
    if words := _torchrun(len(sys.argv) - 1):
        # For example, "train" under `torchrun -m torchtitan_lite`.
        command = sys.argv[1:2] if sys.argv[1:2] == ["train"] else []
        return [program("torchrun"), *words, *command, *arguments]
    num_local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if Path(sys.argv[0]).name == "train.py":
        launcher = [program("torchrun"), "--nproc-per-node", num_local]
        return [*(launcher if world_size > 1 else [program("python")]), "train.py", *arguments]
    count = ["--nproc", num_local] if world_size > 1 else []
    options = shlex.split(os.environ.get(TRAIN_OPTIONS, ""))
    if "--replicas" in options:
        arguments = _without(arguments, _REPLICA_OPTIONS)
    return [*torchtitan_lite(), "train", *count, *options, *arguments]


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without some options and their values, as words of their own."""
    words = iter(arguments)
    return [word for word in words if word not in names or next(words, None) is None]


def _torchrun(num_arguments: int) -> list[str]:
    """Return the words of the torchrun that is the parent of this rank, from its options to the
    program, which `num_arguments` arguments follow; empty if another process is the parent."""
    words = command_line(os.getppid()) if "RANK" in os.environ else []
    place = next((place for place, word in enumerate(words) if names_torchrun(word)), None)
    return [] if place is None else words[place + 1 : len(words) - num_arguments]
