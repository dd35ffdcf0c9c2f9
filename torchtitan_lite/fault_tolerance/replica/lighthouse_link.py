"""Connection of a replica's coordinator to its lighthouse: this project's, or torchft's."""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.core.errors import ReplicaError, RpcError, RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.client import AsyncRpcClient
from torchtitan_lite.fault_tolerance.lighthouse.member import PURPOSE, SERVICE, Member

HEARTBEAT_INTERVAL_S = 0.3
HEARTBEAT_TIMEOUT_S = 3.0
QUORUM_CALL_S = 60.0
_SETTLE_S = 1.0
"""Delay of a request after the lighthouse answers again. By then a restarted lighthouse has
received the heartbeats of all replicas, and forms a quorum of all."""
_RETRY_S = 0.1


@dataclass(frozen=True)
class AgreedQuorum:
    """A quorum whose members have proved themselves."""

    lighthouse: str
    """Identity of the lighthouse's process; of torchft's, its address."""
    quorum_id: int
    members: tuple[Member, ...]
    """Members, in the order of their ids."""


@dataclass(frozen=True)
class LastQuorum:
    """The last quorum of a lighthouse, as it answers a heartbeat."""

    quorum_id: int
    dead: frozenset[str]
    """Ids of the members that send no heartbeats any more."""
    is_member: bool
    """Whether the sender is a member; true if it is not known."""


class LighthouseLink(Protocol):
    """A lighthouse, as a coordinator uses it."""

    async def quorum(self, member: Member, unreachable: Collection[str]) -> AgreedQuorum:
        """Wait for the next quorum; `unreachable` are the ids of replicas that cannot be reached.
        Raises RpcError."""
        ...

    async def heartbeat(self, replica_id: str, unreachable: Collection[str]) -> LastQuorum:
        """Send a heartbeat. Raises RpcError."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class AuthenticatedLighthouse:
    """This project's lighthouse."""

    def __init__(self, address: str, secret: str, run_id: str) -> None:
        self._secret, self._run_id = secret, run_id
        self._client = AsyncRpcClient(address, SERVICE, secret, PURPOSE)

    async def quorum(self, member: Member, unreachable: Collection[str]) -> AgreedQuorum:
        request = {"member": member.seal(self._secret), "unreachable": sorted(unreachable)}
        answer = await self._client.call("Quorum", request, QUORUM_CALL_S)
        return agreed(
            answer["lighthouse"], answer["quorum_id"], answer["members"], member, self._secret
        )

    async def heartbeat(self, replica_id: str, unreachable: Collection[str]) -> LastQuorum:
        request = {
            "run_id": self._run_id,
            "replica_id": replica_id,
            "unreachable": sorted(unreachable),
        }
        answer = await self._client.call("Heartbeat", request, HEARTBEAT_TIMEOUT_S)
        return LastQuorum(
            answer["quorum_id"], frozenset(answer["dead"]), is_member=answer["is_member"] is True
        )

    async def close(self) -> None:
        await self._client.close()


def agreed(
    lighthouse: str, quorum_id: int, sealed: Sequence[str], own: Member, secret: str
) -> AgreedQuorum:
    """Return the quorum of these sealed members, in which `own` must be. Raises RpcError if one of
    them cannot prove itself."""
    try:
        members = tuple(sorted((Member.unseal(text, secret) for text in sealed), key=_id_of))
    except AuthenticationError as error:
        raise RpcError(
            f"The lighthouse named a replica that cannot prove itself: {error}"
        ) from None
    ids = [member.replica_id for member in members]
    if strangers := [member.replica_id for member in members if member.run_id != own.run_id]:
        raise RpcError(
            f"{', '.join(strangers)} is not of this run, {own.run_id}: start a lighthouse for each "
            "run."
        )
    if len(set(ids)) != len(ids) or own.replica_id not in ids:
        raise RpcError("The lighthouse formed a quorum without this replica, or with one twice.")
    return AgreedQuorum(lighthouse, quorum_id, members)


def _id_of(member: Member) -> str:
    return member.replica_id


async def wait_until_it_answers(link: LighthouseLink, replica_id: str, timeout_s: float) -> None:
    """Block until the lighthouse answers, which may start after its replicas. Raises ReplicaError
    if it rejects this replica with a proof, or does not answer with one in time."""
    deadline_s = time.monotonic() + timeout_s
    reported: object = RpcStatus.UNAVAILABLE
    while True:
        try:
            await link.heartbeat(replica_id, ())
            return
        except RpcError as error:
            # Anybody on the way can forge a status without a proof: it is reported only.
            reason = _why_no_answer(error)
            if error.is_final or time.monotonic() >= deadline_s:
                raise ReplicaError(reason) from None
            if error.code is not reported:
                reported = error.code
                logger.warning("%s It is asked again for %g s.", reason, timeout_s)
        await asyncio.sleep(_RETRY_S)


def _why_no_answer(error: RpcError) -> str:
    if error.code is RpcStatus.UNIMPLEMENTED:
        return (
            "The lighthouse does not authenticate its replicas: it is torchft's, or was started "
            "with --serve-torchft. Start `torchtitan-lite coordinator` without that option, or set "
            'fault_tolerance.lighthouse = "torchft" on a private network.'
        )
    return (
        f"No lighthouse answers at TORCHFT_LIGHTHOUSE: {error} Start one (`torchtitan-lite "
        "coordinator`; `torchtitan-lite launch` does) or correct the address."
    )


async def wait_until_settled(answered: asyncio.Event) -> None:
    """Block until a heartbeat is answered, which sets `answered`, and other replicas have had time
    to send theirs."""
    answered.clear()
    await answered.wait()
    await asyncio.sleep(_SETTLE_S)
