"""The [fault_tolerance] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, above, at_least, at_most, only


class FaultToleranceConfig(Section):
    """Fault tolerance: replicas of the job that can leave and rejoin."""

    enable: bool = False
    """Train with other replicas, which may fail and rejoin. The environment variable
    TORCHFT_LIGHTHOUSE is the address of the coordinator, and TORCHTITAN_LITE_TOKEN a secret shared
    by all replicas; `torchtitan-lite launch` sets both."""
    lighthouse: Literal["torchtitan_lite", "torchft"] = "torchtitan_lite"
    """Kind of the lighthouse. "torchft": torchft's own, for compatibility on a private network. It
    accepts unauthenticated clients, which can prevent quorums, but not join one."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend between replicas."""
    process_group_timeout_ms: Annotated[int, at_least(1)] = 60000
    """Timeout of a collective between replicas (milliseconds). A replica whose process dies is
    noticed much sooner."""
    replica_id: Annotated[int, at_least(0)] = 0
    """Number of this replica, from 0."""
    group_size: Annotated[int, at_least(0)] = 0
    """Planned number of replicas; 0: unknown. Does not affect training."""
    min_replica_size: Annotated[int, at_least(1)] = 1
    """Minimum replicas for a step."""
    world_size_mode: Literal["constant_batch", "dynamic", "fixed_with_spares"] = "constant_batch"
    """Samples per step. "constant_batch": `training.global_batch_size`, divided over the
    participating replicas, so that their number changes nothing. "dynamic": as many per
    participating replica. "fixed_with_spares": as many, divided over `min_replica_size` replicas,
    while the others are spares and contribute nothing."""
    quorum_timeout_s: Annotated[float, above(0)] = 600
    """Time that a replica waits for a quorum (seconds)."""
    join_timeout_s: Annotated[float, at_least(0)] = 60
    """Time for which a quorum waits, if all processes of the last one have ended, for replicas of
    it that are missing, because they may have a newer state (seconds)."""
    hang_timeout_s: Annotated[float, at_least(0)] = 600
    """Seconds without progress after which a process writes the stacks of all its threads and
    exits, to be restarted; three times as long while it waits for other replicas. `torchtitan-lite
    launch` also detects a stopped process. Must exceed the longest step. 0: no limit."""
    replay_check: bool = False
    """Recompute an anomalous step before `[anomalies]` applies. A rank with another result has
    faulty hardware: it is named, and its replica ends (without others: the run, with the last good
    state saved). Also without `enable`. Costs a norm of each gradient in each microbatch. Not with
    `compile.enable`."""
    state_check: bool = False
    """Check before each update that weights and optimizer state have not changed since the one
    before. A rank whose state has changed has faulty memory: it is named, and its replica ends
    without a save. Also without `enable`. Reads the state twice per step."""
    heal_interface: str = ""
    """Network interface, or its address, on which state is served to a healing replica; empty: the
    one that reaches the lighthouse."""
    heal_connections: Annotated[int, at_least(1)] = 4
    """Parallel connections of a healing rank."""
    bucket_mib: Annotated[int, at_least(1)] = 32
    """Bucket size of the gradient reduction over replicas (MiB)."""
    keep_gradients: Literal["auto", "on", "off"] = "auto"
    """Keep the gradients of an aborted step, so that after the loss of a replica the others compute
    only the samples that it had. Takes as much memory as the gradients of a rank; "auto": if twice
    as much is free. Only with `world_size_mode = "constant_batch"`, and not with `replay_check` or
    `semi_sync_method`."""
    semi_sync_method: Literal["local_sgd", "diloco", "streaming_diloco"] | None = None
    """Average the replicas every `sync_steps` steps instead of reducing gradients in each.
    "local_sgd": the weights. "diloco": the change of the weights, as the gradient of an outer
    optimizer. "streaming_diloco": the same, one fragment of the model at a time. All of them change
    the training; None changes nothing."""
    sync_steps: Annotated[int, at_least(1)] = 5
    """Steps between averages; with fragments, of the same fragment."""
    should_quantize: bool = False
    """Quantize averages to 8 bits. Needs a GPU with Triton."""
    num_fragments: Annotated[int, at_least(1)] = 1
    """Fragments that "streaming_diloco" averages in turn."""
    module_fqns_per_model_fragment: Annotated[
        list[list[str]], only([], "choosing the modules of each fragment")
    ] = []
    """Modules per fragment. Only the empty list is supported, which splits the layers evenly into
    `num_fragments`."""
    fragment_sync_delay: Annotated[int, at_least(0)] = 0
    """Steps taken while a fragment is being reduced ("streaming_diloco")."""
    fragment_update_alpha: Annotated[float, at_least(0), at_most(1)] = 0.0
    """Weight of a replica's own weights in an averaged fragment ("streaming_diloco")."""
    outer_lr: Annotated[float, above(0)] = 0.7
    """Learning rate of DiLoCo's outer optimizer, SGD with Nesterov momentum."""
    outer_momentum: Annotated[float, above(0)] = 0.9
    """Momentum of DiLoCo's outer optimizer."""

    @property
    def can_keep_gradients(self) -> bool:
        """Whether what replicas have computed of an aborted step can be part of its repetition."""
        # Otherwise their shares depend on their number, or are never summed.
        is_divided = self.world_size_mode == "constant_batch" and self.semi_sync_method is None
        # A recomputation would differ from what was observed in two parts.
        return is_divided and not self.replay_check

    @property
    def replica(self) -> int | None:
        """Number of this replica; None without fault tolerance."""
        return self.replica_id if self.enable else None
