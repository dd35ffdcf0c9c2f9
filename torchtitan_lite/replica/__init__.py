"""Replicas: whole copies of the job that may come and go. Layer: below config and trainer.

The loop asks a `Replicas` who takes part in a step, adds gradients over those, and lets them say
whether the sums hold. A job without fault tolerance is one replica that always agrees with itself.
"""

from torchtitan_lite.replica.hangs import hang_listeners
from torchtitan_lite.replica.participation import (
    LeaveRequested,
    News,
    Replicas,
    Share,
    SingleReplica,
)

__all__ = [
    "LeaveRequested",
    "News",
    "Replicas",
    "Share",
    "SingleReplica",
    "hang_listeners",
]
