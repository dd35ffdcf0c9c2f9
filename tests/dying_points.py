"""The calls of a trainer at which it may be killed: those that change the state, its snapshot, or
what is known of a save."""

import os
import signal
from collections.abc import Callable
from typing import Any

from torchtitan_lite.checkpoint import copier
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.optim.sharded import ShardedOptimizer

_CALLS: dict[str, tuple[Any, str]] = {
    "forward": (FeedForward, "forward"),
    "optimizer": (ShardedOptimizer, "step"),
    "snapshot": (AsynchronousSaver, "_snapshot"),
    "begin": (Region, "begin"),
    "copy": (copier, "foreach_copy_"),
    "complete": (Region, "complete"),
    "header": (Region, "_put_header"),
    "confirm": (Region, "confirm"),
    "order": (WriterProcess, "save"),
    "agreement": (CheckpointManager, "apply_signals"),
}
POINTS = [f"{name}.{when}" for name in _CALLS for when in ("before", "after")]


def die_at(point: str, call: int) -> None:
    """Kill this process at the `call`-th call of a point, before it or when it is done."""
    name, _, when = point.partition(".")
    owner, attribute = _CALLS[name]
    real: Callable[..., Any] = getattr(owner, attribute)
    left = [call]

    def deadly(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*given, **named)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, attribute, deadly)
