"""The [fault_tolerance] section. Layer: imports section only."""

from typing import Annotated, Literal

from torchtitan_lite.section import Section, above, at_least, only


class FaultToleranceConfig(Section):
    """Replicas of the whole job that come and go."""

    enable: bool = False
    """Train with other replicas, which may die and return. The environment variable
    TORCHFT_LIGHTHOUSE names the lighthouse by which they find each other, and
    TORCHTITAN_LITE_TOKEN is a secret that all of them share; `scripts.launch` sets both."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend between replicas."""
    process_group_timeout_ms: Annotated[int, at_least(1)] = 60000
    """Time limit of a collective between replicas (milliseconds). A replica whose process dies is
    noticed much sooner."""
    replica_id: Annotated[int, at_least(0)] = 0
    """Number of this replica, from 0."""
    group_size: Annotated[int, at_least(0)] = 0
    """Replicas that the run is planned for; 0: not known. It changes nothing in training."""
    min_replica_size: Annotated[int, at_least(1)] = 1
    """Replicas without which no step is taken."""
    world_size_mode: Literal["constant_batch", "dynamic", "fixed_with_spares"] = "constant_batch"
    """What a step uses. "constant_batch": `training.global_batch_size` samples, divided over the
    replicas that take part, so that who does changes nothing. "dynamic": so many for each replica
    that takes part. "fixed_with_spares": so many, divided over `min_replica_size` replicas, while
    the others add nothing and stand by."""
    quorum_timeout_s: Annotated[float, above(0)] = 600
    """How long a replica waits for others to take a step with (seconds)."""
    lighthouse_join_timeout_ms: Annotated[int, at_least(1)] = 10000
    """How long the lighthouse waits for others to join, as it was told when it was started
    (milliseconds). Half as long again, a replica waits for its answer before it asks anew: so long
    does it take to find a lighthouse that was started again."""
    hang_timeout_s: Annotated[float, at_least(0)] = 600
    """Seconds without progress after which a process of a replica writes the stacks of all its
    threads and ends, to be started again; waiting for other replicas it has three times as long.
    `scripts.launch` also finds one that is stopped altogether. Longer than the longest step.
    0: it may hang."""
    replay_check: bool = False
    """Compute a step that is not finite or spikes again before `[anomalies]` applies. Where a rank
    comes to something else its machine is at fault: it is named, and its replica ends (without
    others: the run, with the last good state saved). Also without `enable`. Costs a norm of each
    gradient in each microbatch. Not with `compile.enable`."""
    heal_interface: str = ""
    """Network interface, or address of one, on which state is served to a replica that returns;
    empty: the one by which the lighthouse is reached."""
    heal_connections: Annotated[int, at_least(1)] = 4
    """Connections in parallel by which a rank that returns receives its state."""
    bucket_mib: Annotated[int, at_least(1)] = 32
    """Gradients are added up over replicas in buckets of this size (MiB)."""
    semi_sync_method: Annotated[str | None, only(None, "semi-synchronous training")] = None
    """Method that averages replicas less often than each step."""
