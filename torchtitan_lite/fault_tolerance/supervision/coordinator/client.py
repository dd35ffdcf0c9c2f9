"""Client of a coordinator for users and their tools: its status."""

from typing import Any

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.client import RpcClient, host_and_port
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import PURPOSE, SERVICE


def coordinator_status(address: str, secret: str, timeout_s: float) -> dict[str, Any]:
    """Return the status of the coordinator at `address` ("HOST:PORT" or a URL): see
    `Coordinator.status`, and for "quorum" `lighthouse.status.describe`. Raises RpcError."""
    with RpcClient(address, SERVICE, secret, PURPOSE) as client:
        try:
            return client.call("Status", {}, timeout_s)
        except RpcError as error:
            if error.code is RpcStatus.UNIMPLEMENTED:
                raise RpcError(
                    f"{host_and_port(address)} is not the address of a coordinator that has a "
                    "status: it is another server, or was started with --serve-torchft."
                ) from None
            raise RpcError(f"Coordinator: {error}", error.code) from None
