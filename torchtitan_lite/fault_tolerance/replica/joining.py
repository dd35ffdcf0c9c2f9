"""Joining the other replicas through the lighthouse."""

import ipaddress
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

from torchtitan_lite.checkpoint import FencingTokens
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import LighthouseError, ReplicaError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.core.preemption import TrainingLeft
from torchtitan_lite.core.rank.supervised import LIGHTHOUSE
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.network import address_for_others, address_of_interface
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint
from torchtitan_lite.distributed.stores import listening_store
from torchtitan_lite.fault_tolerance.lighthouse.client import notify_left
from torchtitan_lite.fault_tolerance.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.fault_tolerance.replica.fencing import Fence
from torchtitan_lite.fault_tolerance.replica.healing import HealingTransport
from torchtitan_lite.fault_tolerance.replica.healing.live_state import HealableState
from torchtitan_lite.fault_tolerance.replica.healing.transport import PURPOSE
from torchtitan_lite.fault_tolerance.replica.participation import Replicas
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor
from torchtitan_lite.fault_tolerance.replica.semi_synchronous import (
    Averaging,
    SemiSynchronousReplicas,
)
from torchtitan_lite.fault_tolerance.replica.torchft_manager import QuorumManager

_LEAVE_TIMEOUT_S = 1.0


@contextmanager
def join(
    config: FaultToleranceConfig,
    state: HealableState,
    mesh: Mesh,
    *,
    run_id: str,
    fencing_tokens: FencingTokens,
    config_fingerprint: str,
    newest_stored_step: Callable[[], int],
    wait_until_modifiable: Callable[[], None],
    stop_requested: Callable[[], bool],
    initial_stored_step: int,
    phases: Phases,
    averaging: Averaging | None = None,
) -> Iterator[Replicas]:
    """Join the replicas of a run whose state is ready, and leave at the end of the block. Every
    rank must call it, as the last thing before the first step, because the other replicas wait for
    a replica that has joined. With `averaging`, replicas are averaged every few steps. `run_id`
    identifies the run, and is needed on the leader only; `fencing_tokens` are those of the run;
    `config_fingerprint` identifies the settings that all replicas must share; the other arguments
    are those of `FaultTolerantReplicas`.

    Raises ReplicaError if the environment does not name the lighthouse, or the lighthouse does not
    answer.
    """
    lighthouse, token = environment()
    address = address_for(config.heal_interface, lighthouse)
    _check_not_loopback(address, config.heal_interface, lighthouse)
    if config.lighthouse == "torchft" and mesh.is_leader:
        logger.warning(
            "torchft's lighthouse accepts unauthenticated clients: each host that reaches %s can "
            "prevent quorums, but not join one. Use it on a private network only.",
            lighthouse,
        )
    # A store of its own, because torchrun's may hold the manager address of an earlier generation.
    store = listening_store(address) if mesh.is_leader else None
    payload = f"{address} {store.port}" if store is not None else ""
    host, port = broadcast_bytes(payload.encode()).decode().split()
    fence = None
    if mesh.is_leader:
        fence = Fence(fencing_tokens, config.join_timeout_s)
    floor = ProgressFloor(state.cursor if averaging is None else averaging.progress(state.step))
    try:
        transport = HealingTransport(state, address, token)
    except OSError as error:
        raise ReplicaError(
            f"{address} cannot be bound: {error} Set fault_tolerance.heal_interface to an "
            "interface of this machine."
        ) from None
    try:
        manager = QuorumManager(
            config,
            transport,
            floor,
            run_id=run_id,
            config_fingerprint=config_fingerprint,
            lighthouse=lighthouse,
            secret=token,
            store=(host, int(port)),
            rank=mesh.rank,
            world_size=mesh.world_size,
            address=address,
            fencing_token=lambda: 0 if fence is None else fence.token,
        )
    except ReplicaError:
        transport.shutdown()
        if fence is not None:
            fence.close()
        raise
    kind = (
        FaultTolerantReplicas
        if averaging is None
        else partial(SemiSynchronousReplicas, averaging=averaging)
    )
    replicas = kind(
        config,
        state,
        mesh,
        manager=manager,
        transport=transport,
        floor=floor,
        fence=fence,
        endpoint=lambda url: PeerEndpoint(
            url, token, PURPOSE, config.process_group_timeout_ms / 1000, config.heal_connections
        ),
        newest_stored_step=newest_stored_step,
        wait_until_modifiable=wait_until_modifiable,
        leave=lambda replica_id: _leave(lighthouse, replica_id, token),
        stop_requested=stop_requested,
        initial_stored_step=initial_stored_step,
        phases=phases,
    )
    leaves_in_order = False
    try:
        yield replicas
        leaves_in_order = True
    except TrainingLeft:
        leaves_in_order = True
        raise
    finally:
        if fence is not None and leaves_in_order:
            # The others need not wait for this replica.
            fence.release(manager.full_id)
        if fence is not None:
            fence.close()
        replicas.close()
        del store


def _leave(lighthouse: str, replica_id: str, token: str) -> None:
    """Notify the lighthouse, so that no replica waits for this one. torchft's lighthouse does not
    accept departures, and detects the missing heartbeats instead."""
    with suppress(LighthouseError):
        notify_left(lighthouse, replica_id, token, _LEAVE_TIMEOUT_S)


def environment() -> tuple[str, str]:
    """Return the lighthouse's URL and the secret of all replicas. Raises ReplicaError."""
    lighthouse, token = os.environ.get(LIGHTHOUSE, ""), os.environ.get(TOKEN, "")
    if not lighthouse:
        raise ReplicaError(
            f"fault_tolerance.enable is true, and {LIGHTHOUSE} is not set: it names the "
            "lighthouse, such as http://10.0.0.1:29520: the address of `torchtitan-lite "
            "coordinator`. `torchtitan-lite launch` sets it."
        )
    if problem := secret_problem(token):
        raise ReplicaError(
            f"fault_tolerance.enable is true, and {problem} `torchtitan-lite launch` generates one."
        )
    return lighthouse, token


def address_for(interface: str, lighthouse: str) -> str:
    """Return an address of this machine: that of `interface`, or if it is empty, of the interface
    that routes to the lighthouse. Raises ReplicaError."""
    if interface:
        try:
            return address_of_interface(interface)
        except ValueError as error:
            raise ReplicaError(f"fault_tolerance.heal_interface: {error}") from None
    parts = urlsplit(lighthouse if "://" in lighthouse else f"http://{lighthouse}")
    try:
        return address_for_others(parts.hostname or "", parts.port or 80)
    except (OSError, ValueError) as error:
        raise ReplicaError(f"{LIGHTHOUSE} = {lighthouse} cannot be reached: {error}") from None


def _check_not_loopback(address: str, interface: str, lighthouse: str) -> None:
    """Raise ReplicaError if the other replicas, which reach the lighthouse, cannot reach
    `address`."""
    if not ipaddress.ip_address(address).is_loopback or not interface:
        return
    if not ipaddress.ip_address(address_for("", lighthouse)).is_loopback:
        raise ReplicaError(
            f"fault_tolerance.heal_interface = {interface!r} is a loopback interface, but the "
            f"lighthouse {lighthouse} is on another machine: leave it empty, or name the interface "
            "that the other replicas reach."
        )
