"""The [fault_tolerance] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import Section, above, at_least, at_most, only


class FaultToleranceConfig(Section):
    """Replicas of the whole job that come and go."""

    enable: bool = False
    """Train with other replicas, which may die and return. The environment variable
    TORCHFT_LIGHTHOUSE names the lighthouse by which they find each other, and
    TORCHTITAN_LITE_TOKEN is a secret that all of them share; `torchtitan-lite launch` sets both."""
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
    hang_timeout_s: Annotated[float, at_least(0)] = 600
    """Seconds without progress after which a process of a replica writes the stacks of all its
    threads and ends, to be started again; waiting for other replicas it has three times as long.
    `torchtitan-lite launch` also finds one that is stopped altogether. Longer than the longest
    step. 0: it may hang."""
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
    semi_sync_method: Literal["local_sgd", "diloco", "streaming_diloco"] | None = None
    """Average the replicas every `sync_steps` steps instead of adding up gradients in each.
    "local_sgd": the weights. "diloco": what the weights have moved by, as the gradient of an outer
    optimizer. "streaming_diloco": the same, one fragment of the model after the other. All of them
    change what is trained; None changes nothing."""
    sync_steps: Annotated[int, at_least(1)] = 5
    """Steps from one average to the next; with fragments, of the same fragment."""
    should_quantize: bool = False
    """Send 8 bits a number when averaging. Needs a GPU with Triton."""
    num_fragments: Annotated[int, at_least(1)] = 1
    """Parts of the model that "streaming_diloco" averages in turn."""
    module_fqns_per_model_fragment: Annotated[
        list[list[str]], only([], "choosing the modules of each fragment")
    ] = []
    """Modules of each fragment. Only the empty list, with which the layers are split evenly into
    `num_fragments`."""
    fragment_sync_delay: Annotated[int, at_least(0)] = 0
    """Steps that are taken while a fragment is on its way ("streaming_diloco")."""
    fragment_update_alpha: Annotated[float, at_least(0), at_most(1)] = 0.0
    """Share of its own weights that a replica keeps in an averaged fragment
    ("streaming_diloco")."""
    outer_lr: Annotated[float, above(0)] = 0.7
    """Learning rate of DiLoCo's outer optimizer, SGD with Nesterov momentum."""
    outer_momentum: Annotated[float, above(0)] = 0.9
    """Momentum of DiLoCo's outer optimizer."""
