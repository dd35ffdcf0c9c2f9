"""Client of a lighthouse for supervisors: leave notices and status. Layer: above messages."""

import json
from typing import Any

import grpc

from torchtitan_lite.errors import LighthouseError
from torchtitan_lite.lighthouse import messages

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # Without this, gRPC remembers an earlier failure, and does not try a lighthouse that has
    # started since.
    ("grpc.use_local_subchannel_pool", 1),
)


def notify_left(address: str, replica_id: str, token: str, timeout_s: float) -> list[str]:
    """Notify the lighthouse at `address` ("HOST:PORT" or a URL) that a replica has left: its id
    "NAME:UUID", or its NAME, which must not have started again yet. Return the ids that no longer
    count. Raises LighthouseError."""
    request = messages.LeftRequest(token=token, replica_id=replica_id)
    response = _call(address, "Left", request, messages.LeftResponse, timeout_s)
    return list(response.replica_ids)


def status(address: str, token: str, timeout_s: float) -> dict[str, Any]:
    """Return the status of the lighthouse at `address`, see `status.describe`. Raises
    LighthouseError."""
    request = messages.StatusRequest(token=token)
    return json.loads(_call(address, "Status", request, messages.StatusResponse, timeout_s).json)


def _call(address: str, name: str, request: Any, response: Any, timeout_s: float) -> Any:
    place = address.rpartition("//")[2].rstrip("/")

    def to_bytes(given: Any) -> bytes:
        return given.SerializeToString()

    with grpc.insecure_channel(place, options=_OPTIONS) as channel:
        call = channel.unary_unary(
            f"/{messages.OWN_SERVICE}/{name}",
            request_serializer=to_bytes,
            response_deserializer=response.FromString,
        )
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise LighthouseError(_why(place, timeout_s, error)) from None


def _why(place: str, timeout_s: float, error: Any) -> str:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return (
            f"The lighthouse at {place} refuses: {details} TORCHTITAN_LITE_TOKEN must be the same "
            "here and where it was started."
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"The lighthouse at {place} did not answer in {timeout_s:g} s."
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"The lighthouse at {place} is not that of torchtitan_lite."
    return f"No lighthouse answers at {place}: {details}"
