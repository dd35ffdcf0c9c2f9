"""`torchtitan-lite train`, and the entry point of every rank.

With --nproc the configuration is checked once, before any process starts; the ranks receive Ctrl-C
as SIGINT, so that they save and exit. With --spares an agent starts them (`train_agents`), which
replaces a rank that dies. With --rdzv-endpoint the agents of several machines run them together
(`train_machines`). What a rank needs is imported once the configuration is known to be right, so
that a typo fails fast.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from torchtitan_lite.cli.coordinator import coordinator_secret
from torchtitan_lite.cli.train_options import TrainOptions, checked_config, split_options
from torchtitan_lite.cli.train_processes import die_with_nproc, run_local_ranks
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import ConfigError, UserError, exit_status_after, restart_may_help
from torchtitan_lite.core.imports import imports_without_gc
from torchtitan_lite.core.log import configure_logging, log_error_on_rank_0, logger
from torchtitan_lite.core.rank.supervised import LIGHTHOUSE, RANK_CHANNEL
from torchtitan_lite.core.standard_streams import make_streams_patient

if TYPE_CHECKING:
    from torchtitan_lite.fault_tolerance.supervision.agent.worker import RecoveryHooks


def run_train(argv: Sequence[str]) -> int:
    """Train according to `argv`, in this process or in --nproc processes. Returns the exit
    status."""
    configure_logging(beside_steps=True)
    if RANK_CHANNEL in os.environ:
        return _serve(argv)
    try:
        options, arguments = split_options(argv)
        is_plain = not options.num_spares and not options.endpoint and options.num_replicas == 1
        if "RANK" in os.environ or (is_plain and options.num_ranks == 1):
            return train_rank(arguments)
        if options.num_replicas > 1 and not options.endpoint:
            return _launch_replicas(arguments, options)
        config, _ = checked_config([*arguments, *options.of_replica(0)], options.world_size)
        return _train_in_processes(arguments, options, config)
    except UserError as error:
        log_error_on_rank_0(error)
        return exit_status_after(error)


def _train_in_processes(arguments: Sequence[str], options: TrainOptions, config: Config) -> int:
    """Train in processes that this one starts. Returns the exit status. Raises UserError."""
    if options.endpoint:
        if config.fault_tolerance.enable and options.num_replicas == 1:
            raise ConfigError(
                "--rdzv-endpoint is given, and fault_tolerance.enable is true: give --replicas R, "
                "which enables it, or omit one."
            )
        secret = coordinator_secret()
        from torchtitan_lite.cli.train_machines import train_on_machines

        return train_on_machines(arguments, options, config, secret)
    from torchtitan_lite.training.run_folder import check_folder

    check_folder(config)
    if options.num_spares:
        from torchtitan_lite.cli.train_agents import train_with_spares

        return train_with_spares(arguments, options, config)
    return run_local_ranks(arguments, options.num_ranks)


def _launch_replicas(arguments: Sequence[str], options: TrainOptions) -> int:
    """Train several replicas on this machine: `torchtitan-lite launch`. Returns the exit status."""
    from torchtitan_lite.cli import launch
    from torchtitan_lite.cli.parsers import parser

    words = [
        f"--replicas={options.num_replicas}",
        f"--nproc-per-replica={options.num_ranks}",
        f"--spares={options.num_spares}",
    ]
    launched = parser().parse_args(["launch", *words])
    launched.argv = words
    return launch.run(launched, arguments)


def train_rank(argv: Sequence[str], recovery: "RecoveryHooks | None" = None) -> int:
    """Train as one rank of the world that the environment describes, or alone. `recovery` is that
    of a process which an agent supervises. Returns the exit status."""
    make_streams_patient()
    configure_logging(beside_steps=True)
    die_with_nproc()
    try:
        config, file = checked_config(argv, int(os.environ.get("WORLD_SIZE", "1")))
        from torchtitan_lite.training.checks.torchtitan_file import log_about_keys

        log_about_keys(config, file)
        if config.memory_estimation.enable:
            from torchtitan_lite.cli.estimate import estimate_instead

            return estimate_instead(config)
    except UserError as error:
        log_error_on_rank_0(error)
        return _end_with(error, recovery)
    with imports_without_gc():
        from torchtitan_lite.cli.train_rank import run_rank

    try:
        run_rank(config, argv, recovery)
    except UserError as error:
        logger.error("%s", error)
        return _end_with(error, recovery)
    return 0


def _end_with(error: UserError, recovery: "RecoveryHooks | None") -> int:
    """Return the exit status after `error`, which the agent, if there is one, reports too."""
    if recovery is not None:
        recovery.end_reason = str(error).partition("\n")[0]
        recovery.may_restart = restart_may_help(error)
    return exit_status_after(error)


def _serve(argv: Sequence[str]) -> int:
    """Train as the rank that the agent assigns to this process. Returns the exit status."""
    die_with_nproc()
    with imports_without_gc():
        from torchtitan_lite.fault_tolerance.supervision.agent.worker import serve

    return serve(
        lambda recovery, changed: train_rank([*argv, *changed], recovery),
        _import_rank,
        _import_compiler,
    )


def _import_compiler() -> None:
    """Import torch's compiler, which FSDP imports when it shards the first module."""
    with imports_without_gc():
        import_module("torch._dynamo")


def _import_rank() -> None:
    """Import what `train_rank` does, some of it only when it needs it."""
    with imports_without_gc():
        for name in (
            "torchtitan_lite.training.checks.constraints",
            "torchtitan_lite.cli.train_rank",
            "tokenizers",
        ):
            import_module(name)
        if LIGHTHOUSE in os.environ:
            # With torchft.
            import_module("torchtitan_lite.fault_tolerance.replica.joining")
