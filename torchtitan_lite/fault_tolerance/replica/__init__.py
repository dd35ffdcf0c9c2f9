"""Fault-tolerant replicas: complete copies of the job that may fail and rejoin.

The training loop uses a `Replicas`: it forms the quorum of a step, reduces gradients over its
participants, and votes on whether to commit the step. A job without fault tolerance is a single
replica.
"""

from torchtitan_lite.fault_tolerance.replica.hang_handling import hang_listeners
from torchtitan_lite.fault_tolerance.replica.participation import (
    LeaveRequested,
    Replicas,
    Share,
    SingleReplica,
)

__all__ = [
    "LeaveRequested",
    "Replicas",
    "Share",
    "SingleReplica",
    "hang_listeners",
]
