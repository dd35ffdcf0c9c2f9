"""Training under an agent of this machine, with spare ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchtitan_lite.cli.train_options import TrainOptions, checked_config
from torchtitan_lite.cli.train_processes import agent_environment, received_signals
from torchtitan_lite.config import Config, check_live_resize, check_resize_arguments
from torchtitan_lite.core.outputs import output_folder
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_agent import RankAgent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import RankProcess
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeRequest,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import RestartPolicy

_MAX_RESTARTS = 10
"""Replacements of ranks in a row, without 20 s of progress between them."""


def train_with_spares(arguments: Sequence[str], options: TrainOptions, config: Config) -> int:
    """Start an agent with the ranks and the spares. Returns the exit status."""
    inbox, check_resize = resizing(arguments, options, config)
    environment = agent_environment(options)
    with received_signals() as received:
        agent = RankAgent(
            lambda: RankProcess(arguments, environment),
            RunMesh(options.num_ranks, options.resized),
            options.num_spares,
            # Constant, because a generation takes seconds anyway, and equal failures end the run.
            policy=RestartPolicy(_MAX_RESTARTS, first_delay_s=0.1, max_delay_s=0.1),
            requests=received,
            inbox=inbox,
            check_resize=check_resize,
        )
        agent.run()
    return agent.exit_status


def resizing(
    arguments: Sequence[str], options: TrainOptions, config: Config
) -> tuple[RequestInbox, Callable[[ResizeRequest], None]]:
    """Return where the agent receives requests to resize the run, and their check."""

    is_joint, on_machines = options.num_replicas > 1, bool(options.endpoint)

    def check(request: ResizeRequest) -> None:
        check_resize_arguments(request.mesh.arguments)
        world_size = replace(options, num_ranks=request.mesh.num_ranks).world_size
        words = [*arguments, *options.of_replica(0), *request.mesh.arguments]
        resized, _ = checked_config(words, world_size)
        check_live_resize(config, resized, is_joint=is_joint or request.is_joint)

    replica = None if on_machines else config.fault_tolerance.replica
    folder = output_folder(config.job.dump_folder, replica)
    return RequestInbox(folder, is_shared=on_machines), check
