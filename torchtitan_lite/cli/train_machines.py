"""Training together with other machines, which a coordinator connects."""

import os
from collections.abc import Sequence
from ipaddress import ip_address
from os.path import abspath

from torchtitan_lite.cli.train_agents import resize_inbox
from torchtitan_lite.cli.train_options import TrainOptions
from torchtitan_lite.cli.train_processes import agent_environment, received_signals
from torchtitan_lite.config import Config, config_fingerprint
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.rank.supervised import LIGHTHOUSE
from torchtitan_lite.core.urls import is_url
from torchtitan_lite.distributed.network import address_for_others, names_loopback
from torchtitan_lite.fault_tolerance.supervision.agent.lease import AdoptedWriters
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    rank_command,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.remote_link import RemoteLink
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh


def train_on_machines(
    arguments: Sequence[str], options: TrainOptions, config: Config, secret: str
) -> int:
    """Train as one of several machines with the same `secret`, or wait as a spare one. Returns the
    exit status. Raises UserError."""
    address = _own_address(options)
    link = RemoteLink(
        options.endpoint,
        secret,
        address=address,
        name=f"{address} (process {os.getpid()})",
        run_id=options.run_id,
        num_machines=options.num_machines,
        num_replicas=options.num_replicas,
        num_ranks=options.num_ranks,
        fingerprint=config_fingerprint(config, options.world_size),
        # With checkpoints in an object store, each machine may have a folder of its own.
        dump_folder="" if is_url(config.checkpoint.folder) else abspath(config.job.dump_folder),
    )
    inbox = resize_inbox(arguments, options, config)
    environment = {
        **agent_environment(options),
        # The coordinator is the lighthouse, too.
        LIGHTHOUSE: f"http://{options.endpoint}",
    }
    with received_signals() as received:
        member = Member(
            lambda: RankProcess(rank_command(arguments), environment),
            RunMesh(options.num_ranks),
            options.num_spares,
            link=link,
            inbox=inbox,
            requests=received,
            join_timeout_s=options.join_timeout_s,
            writers=AdoptedWriters(),
            replica_arguments=options.of_replica,
        )
        inbox.start()
        link.start()
        member.run()
    return member.exit_status


def _own_address(options: TrainOptions) -> str:
    """Return the address at which the other machines reach this one. Raises ConfigError."""
    host, _, port = options.endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        address = address_for_others(host, int(port))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--rdzv-endpoint {options.endpoint} cannot be reached from this machine: {error}"
        ) from None
    is_local = ip_address(address).is_loopback and not names_loopback(host)
    if is_local and options.num_machines > 1:
        raise ConfigError(
            f"This machine reaches --rdzv-endpoint {options.endpoint} by {address}, which other "
            "machines cannot reach: name an address of the network that all machines share."
        )
    return address
