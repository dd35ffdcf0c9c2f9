"""What torchft's manager asks of whoever moves state between replicas. Layer: above client."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft.checkpointing import CheckpointTransport

from torchtitan_lite.replica.healing.live_state import LiveState, Run
from torchtitan_lite.replica.healing.server import StateServer


@dataclass(frozen=True)
class Source:
    """Where the state of a peer is to be had."""

    url: str
    progress: int


class HealingTransport(CheckpointTransport[dict[str, Any]]):
    """Offers this rank's live state, and notes where a peer offers its own.

    The donor's tensors do not change while they are offered: the step that would change them
    needs the one that receives them.
    """

    def __init__(self, run: Run, address: str, token: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._run = run
        self._server = StateServer(address, token)
        self.source: Source | None = None
        """What this rank is to receive before the next step."""

    def metadata(self) -> str:
        """Where this rank's state would be."""
        return self._server.url

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer it, in its place in memory."""
        del dst_ranks, state_dict, timeout
        self._server.offer(step, LiveState.of(self._run))

    def disallow_checkpoint(self) -> None:
        """The state may change from here on."""
        self._server.withdraw()

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Note the source: the main thread fetches it, when nothing reads the state any more."""
        del src_rank, timeout
        self.source = Source(metadata, step)
        return {"user": {"state": None}, "torchft": {"step": step, "batches_committed": 0}}

    def shutdown(self, wait: bool = True) -> None:
        """Give nothing any more."""
        del wait
        self._server.close()
