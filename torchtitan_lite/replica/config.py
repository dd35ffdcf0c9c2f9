"""The [fault_tolerance] section. Layer: imports section only."""

from typing import Annotated

from torchtitan_lite.section import Section, at_least, only


class FaultToleranceConfig(Section):
    """Replicas of the whole job that come and go."""

    enable: Annotated[bool, only(False, "training over fault-tolerant replicas")] = False
    """Train with other replicas, which may die and return."""
    process_group: str = "gloo"
    """Backend between replicas; without effect while switched off."""
    process_group_timeout_ms: Annotated[int, at_least(1)] = 10000
    """Time limit of a collective between replicas (milliseconds); without effect while switched
    off."""
    replica_id: Annotated[int, at_least(0)] = 0
    """Number of this replica; without effect while switched off."""
    group_size: Annotated[int, at_least(0)] = 0
    """Replicas that the run is planned for; without effect while switched off."""
    min_replica_size: Annotated[int, at_least(1)] = 1
    """Replicas without which no step is taken; without effect while switched off."""
    semi_sync_method: Annotated[str | None, only(None, "semi-synchronous training")] = None
    """Method that averages replicas less often than each step."""
