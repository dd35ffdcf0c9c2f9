"""Client of a lighthouse for supervisors."""

from torchtitan_lite.core.errors import LighthouseError, RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.client import RpcClient, host_and_port
from torchtitan_lite.fault_tolerance.lighthouse.member import PURPOSE, SERVICE


def notify_left(address: str, replica_id: str, secret: str, timeout_s: float) -> list[str]:
    """Notify the lighthouse at `address` ("HOST:PORT" or a URL) that a replica has left: its id
    "NAME:FINGERPRINT:UUID", or its NAME, which must not have started again yet. Return the ids that
    no longer count. Raises LighthouseError."""
    with RpcClient(address, SERVICE, secret, PURPOSE) as client:
        try:
            return client.call("Left", {"replica_id": replica_id}, timeout_s)["replica_ids"]
        except RpcError as error:
            if error.code is RpcStatus.UNIMPLEMENTED:
                raise LighthouseError(
                    f"The lighthouse at {host_and_port(address)} is not that of torchtitan_lite, "
                    "or was started with --serve-torchft."
                ) from None
            raise LighthouseError(f"Lighthouse: {error}") from None
