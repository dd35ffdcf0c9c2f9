"""torchft's lighthouse, as a replica's coordinator uses it."""

from collections.abc import Collection
from typing import Any

import grpc.aio

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.client import host_and_port
from torchtitan_lite.fault_tolerance.lighthouse import torchft_messages as messages
from torchtitan_lite.fault_tolerance.lighthouse.member import Member
from torchtitan_lite.fault_tolerance.replica.lighthouse_link import (
    HEARTBEAT_TIMEOUT_S,
    QUORUM_CALL_S,
    AgreedQuorum,
    LastQuorum,
    agreed,
)

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # Without this, gRPC remembers an earlier failure, and does not try a server that has started
    # since.
    ("grpc.use_local_subchannel_pool", 1),
    # A cut of the network is noticed within seconds, and over within one more after it ends.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class TorchftLighthouse:
    """torchft's lighthouse, which serves any client. The members of its quorums are checked here
    all the same, but a stranger can prevent quorums."""

    def __init__(self, address: str, secret: str, run_id: str) -> None:
        del run_id
        self._secret, self._address = secret, address
        self._channel = grpc.aio.insecure_channel(host_and_port(address), options=_OPTIONS)

    async def quorum(self, member: Member, unreachable: Collection[str]) -> AgreedQuorum:
        del unreachable
        request = messages.LighthouseQuorumRequest()
        for name in ("replica_id", "address", "store_address", "step", "world_size"):
            setattr(request.requester, name, getattr(member, name))
        request.requester.shrink_only = member.shrink_only
        request.requester.commit_failures = member.commit_failures
        request.requester.data = member.seal(self._secret)
        response = messages.LighthouseQuorumResponse
        answer = await self._call("Quorum", request, response, QUORUM_CALL_S)
        sealed = [participant.data for participant in answer.quorum.participants]
        return agreed(self._address, answer.quorum.quorum_id, sealed, member, self._secret)

    async def heartbeat(self, replica_id: str, unreachable: Collection[str]) -> LastQuorum:
        del unreachable
        request = messages.LighthouseHeartbeatRequest(replica_id=replica_id)
        response = messages.LighthouseHeartbeatResponse
        await self._call("Heartbeat", request, response, HEARTBEAT_TIMEOUT_S)
        return LastQuorum(0, frozenset(), is_member=True)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        call = self._channel.unary_unary(
            f"/{messages.SERVICE}/{name}",
            request_serializer=_serialized,
            response_deserializer=response.FromString,
        )
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            code = RpcStatus.__members__.get(error.code().name)
            raise RpcError(f"torchft's lighthouse: {error.details()}", code) from None


def _serialized(message: Any) -> bytes:
    return message.SerializeToString()
