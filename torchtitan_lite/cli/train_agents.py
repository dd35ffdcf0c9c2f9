"""Training under an agent of this machine, with spare ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchtitan_lite.cli.train_options import TrainOptions, checked_config
from torchtitan_lite.cli.train_processes import agent_environment, received_signals
from torchtitan_lite.config import Config, check_live_resize, check_resize_arguments
from torchtitan_lite.core.outputs import output_folder
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    rank_command,
)
from torchtitan_lite.fault_tolerance.supervision.agent.resize_inbox import ResizeInbox
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import LocalLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import RunRules
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeRequest,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import RestartPolicy

_MAX_RESTARTS = 10
"""Replacements of ranks in a row, without 20 s of progress between them."""


def _policy(replica: int) -> RestartPolicy:
    # Constant, because a generation takes seconds anyway, and equal failures end the run.
    return RestartPolicy(_MAX_RESTARTS, first_delay_s=0.1, max_delay_s=0.1)


def train_with_spares(arguments: Sequence[str], options: TrainOptions, config: Config) -> int:
    """Start the ranks and the spares, and replace ranks that die. Returns the exit status."""
    inbox = resize_inbox(arguments, options, config)
    environment = agent_environment(options)
    coordinator = RunCoordinator(time.monotonic(), RunRules(policy=_policy, is_local=True))
    mesh = RunMesh(options.num_ranks)
    with received_signals() as received:
        member = Member(
            lambda: RankProcess(rank_command(arguments), environment),
            mesh,
            options.num_spares,
            link=LocalLink(coordinator, mesh),
            inbox=inbox,
            requests=received,
        )
        inbox.start()
        member.run()
    return member.exit_status


def resize_inbox(arguments: Sequence[str], options: TrainOptions, config: Config) -> ResizeInbox:
    """Return where the agent receives requests to resize the run."""
    on_machines = bool(options.endpoint)
    replica = None if on_machines else config.fault_tolerance.replica
    folder = output_folder(config.job.dump_folder, replica)
    return ResizeInbox(
        RequestInbox(folder, is_shared=on_machines),
        resize_check(arguments, options, config),
        check_arguments=check_resize_arguments,
    )


def resize_check(
    arguments: Sequence[str], options: TrainOptions, config: Config
) -> Callable[[ResizeRequest], None]:
    """Return what raises ConfigError for a request that the run cannot follow."""

    def check(request: ResizeRequest) -> None:
        check_resize_arguments(request.mesh.arguments)
        world_size = replace(options, num_ranks=request.mesh.num_ranks).world_size
        words = [*arguments, *options.of_replica(0), *request.mesh.arguments]
        resized, _ = checked_config(words, world_size)
        check_live_resize(config, resized, is_joint=options.num_replicas > 1)

    return check
