"""How a replica finds the others. Layer: above semi_synchronous."""

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from torchtitan_lite.errors import LighthouseError, ReplicaError
from torchtitan_lite.lighthouse.client import tell_left
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.messages import leader_says
from torchtitan_lite.phases import Phases
from torchtitan_lite.replica.averaging import Averaging
from torchtitan_lite.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.replica.guard import Floor
from torchtitan_lite.replica.healing import HealingTransport
from torchtitan_lite.replica.healing.client import Link
from torchtitan_lite.replica.healing.live_state import Run
from torchtitan_lite.replica.participation import Replicas
from torchtitan_lite.replica.semi_synchronous import SemiSynchronousReplicas
from torchtitan_lite.replica.torchft_manager import QuorumManager
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
TOKEN = "TORCHTITAN_LITE_TOKEN"
_FEWEST_TOKEN_CHARS = 16
_GOODBYE_S = 1.0


@contextmanager
def join(
    config: FaultToleranceConfig,
    run: Run,
    mesh: Mesh,
    *,
    likeness: str,
    newest_stored: Callable[[], int],
    before_change: Callable[[], None],
    leaves: Callable[[], bool],
    stored_before: int,
    phases: Phases,
    averaging: Averaging | None = None,
) -> Iterator[Replicas]:
    """The replicas of a run whose state is ready, until the end of the block. Every rank must call
    it, as the last before the first step: who has joined is waited for. With `averaging` they are
    averaged every few steps. `likeness` is as in `config.likeness`, the rest as in
    `FaultTolerantReplicas`.

    Raises ReplicaError when the environment does not say where the others are, or nobody is there.
    """
    lighthouse, token = environment()
    address = address_for(config.heal_interface, lighthouse)
    # torchrun's own store would remember the manager of an earlier start.
    store = _store(address) if mesh.is_leader else None
    told = f"{address} {store.port}" if store is not None else ""
    host, port = leader_says(told.encode()).decode().split()
    floor = Floor(run.cursor if averaging is None else averaging.progress(run.step))
    try:
        transport = HealingTransport(run, address, token)
    except OSError as error:
        raise ReplicaError(
            f"{address} cannot be bound to: {error} Set fault_tolerance.heal_interface to an "
            "interface of this machine."
        ) from None
    try:
        manager = QuorumManager(
            config,
            transport,
            floor,
            likeness=likeness,
            lighthouse=lighthouse,
            store=(host, int(port)),
            rank=mesh.rank,
            world_size=mesh.world_size,
            hostname=address,
        )
    except ReplicaError:
        transport.shutdown()
        raise
    kind = (
        FaultTolerantReplicas
        if averaging is None
        else partial(SemiSynchronousReplicas, averaging=averaging)
    )
    replicas = kind(
        config,
        run,
        mesh,
        manager=manager,
        transport=transport,
        floor=floor,
        link=lambda url: Link(
            url, token, config.process_group_timeout_ms / 1000, config.heal_connections
        ),
        newest_stored=newest_stored,
        before_change=before_change,
        say_goodbye=lambda replica_id: _say_goodbye(lighthouse, replica_id, token),
        leaves=leaves,
        stored_before=stored_before,
        phases=phases,
    )
    try:
        yield replicas
    finally:
        replicas.close()
        del store


def _store(address: str) -> dist.TCPStore:  # pyright: ignore[reportPrivateImportUsage]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, 0, is_master=True, wait_for_workers=False
    )


def _say_goodbye(lighthouse: str, replica_id: str, token: str) -> None:
    """So that nobody waits for this replica. torchft's lighthouse cannot be told, and finds out."""
    with suppress(LighthouseError):
        tell_left(lighthouse, replica_id, token, _GOODBYE_S)


def environment() -> tuple[str, str]:
    """The lighthouse's URL and the secret of all replicas. Raises ReplicaError."""
    lighthouse, token = os.environ.get(LIGHTHOUSE, ""), os.environ.get(TOKEN, "")
    if not lighthouse:
        raise ReplicaError(
            f"fault_tolerance.enable is true, and {LIGHTHOUSE} is not set: it names the "
            "lighthouse, such as http://10.0.0.1:29510. `torchtitan-lite launch` starts one."
        )
    if len(token) < _FEWEST_TOKEN_CHARS:
        raise ReplicaError(
            f"fault_tolerance.enable is true, and {TOKEN} has {len(token)} characters of at least "
            f"{_FEWEST_TOKEN_CHARS}: it is a secret that all replicas share. "
            "`torchtitan-lite launch` draws one; elsewhere set it to the output of "
            "`openssl rand -hex 16`."
        )
    return lighthouse, token


def address_for(interface: str, lighthouse: str) -> str:
    """An address of this machine: of the interface asked for, else of the one by which packets
    reach the lighthouse. Raises ReplicaError."""
    found = psutil.net_if_addrs()
    if interface in found:
        families = (socket.AF_INET, socket.AF_INET6)
        for family in families:
            for one in found[interface]:
                if one.family == family:
                    return one.address.partition("%")[0]
        raise ReplicaError(f"Interface {interface} has no address.")
    if interface:
        try:
            return str(ipaddress.ip_address(interface))
        except ValueError:
            raise ReplicaError(
                f"fault_tolerance.heal_interface = {interface!r} is no address, and no interface "
                f"of this machine: {', '.join(sorted(found))}."
            ) from None
    parts = urlsplit(lighthouse if "://" in lighthouse else f"http://{lighthouse}")
    try:
        host, port = parts.hostname or "", parts.port or 80
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Nothing is sent: this only asks for the route.
            probe.connect(place)
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ReplicaError(f"{LIGHTHOUSE} = {lighthouse} cannot be reached: {error}") from None
