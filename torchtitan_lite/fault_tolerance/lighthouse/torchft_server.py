"""The lighthouse for torchft's managers, which gRPC serves, without authentication."""

import socket
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from torchtitan_lite.distributed.rpc.server import CallError, Serving
from torchtitan_lite.fault_tolerance.lighthouse import torchft_messages as messages
from torchtitan_lite.fault_tolerance.lighthouse.rules import Quorum
from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Managers ping without pending calls every minute.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # Notice within seconds that a client's machine is gone.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.max_receive_message_length", 1 << 20),
    # Anybody can connect, but the process keeps its descriptors.
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 5000),
)


async def serve_torchft(
    servicer: LighthouseServicer, listeners: Sequence[socket.socket]
) -> Serving:
    """Serve torchft's managers at the addresses of `listeners`, which it closes."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_handler(servicer),))
    for listener in listeners:
        host, port = listener.getsockname()[:2]
        # gRPC takes no sockets.
        listener.close()
        server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await server.start()
    return _GrpcServing(server)


class _GrpcServing(Serving):
    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def stop_accepting(self) -> None: ...

    async def close(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _handler(servicer: LighthouseServicer) -> grpc.GenericRpcHandler:
    async def quorum(request: Any, context: Any) -> Any:
        if not request.HasField("requester"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The requester is missing.")
        try:
            return _response(await servicer.wait_for_quorum(request.requester))
        except CallError as error:
            await context.abort(grpc.StatusCode[error.code.name], error.message)

    async def heartbeat(request: Any, context: Any) -> Any:
        del context
        servicer.record_heartbeat(request.replica_id)
        return messages.LighthouseHeartbeatResponse()

    calls = {
        "Quorum": (quorum, messages.LighthouseQuorumRequest),
        "Heartbeat": (heartbeat, messages.LighthouseHeartbeatRequest),
    }
    return grpc.method_handlers_generic_handler(
        messages.SERVICE,
        {
            call: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for call, (answer, request) in calls.items()
        },
    )


def _response(quorum: Quorum) -> Any:
    response = messages.LighthouseQuorumResponse()
    response.quorum.quorum_id = quorum.quorum_id
    response.quorum.participants.extend(quorum.members)
    response.quorum.created.seconds, response.quorum.created.nanos = divmod(
        time.time_ns(), 1_000_000_000
    )
    return response
