"""torchft's checkpoint transport over HTTP: serves this rank's live state, and notes which peer
serves its own."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft.checkpointing import CheckpointTransport

from torchtitan_lite.distributed.rpc.state_server import StateServer
from torchtitan_lite.fault_tolerance.replica.healing.live_state import HealableState, LiveState

PURPOSE = "healing"
"""Purpose of the sessions."""


@dataclass(frozen=True)
class HealSource:
    """URL and progress of a peer's state."""

    url: str
    progress: int


class HealingTransport(CheckpointTransport[dict[str, Any]]):
    """Transport that serves this rank's live state, and notes the source to heal from.

    The donor's tensors do not change while they are served, because the step that would change them
    needs the healing replica.
    """

    def __init__(self, state: HealableState, address: str, secret: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._state = state
        self._server = StateServer(address, secret, PURPOSE)
        self.source: HealSource | None = None
        """Source that this rank must heal from before the next step."""

    def metadata(self) -> str:
        """Return the URL of this rank's server."""
        return self._server.url

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Serve the state in place, without copying it."""
        del dst_ranks, state_dict, timeout
        self._server.offer(step, LiveState.of(self._state))

    def disallow_checkpoint(self) -> None:
        """Stop serving the state, which may be modified from now on."""
        self._server.withdraw()

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Note the source. The main thread fetches the state once nothing reads the old one."""
        del src_rank, timeout
        self.source = HealSource(metadata, step)
        return {"user": {"state": None}, "torchft": {"step": step, "batches_committed": 0}}

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server."""
        del wait
        self._server.close()
