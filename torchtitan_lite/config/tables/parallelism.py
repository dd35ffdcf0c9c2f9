"""The [parallelism] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, at_least, only, positive_or_minus_one


class ParallelismConfig(Section):
    """Degrees of parallelism. Their product is the number of processes."""

    data_parallel_replicate_degree: Annotated[int, at_least(1)] = 1
    """Replicas of the weights (HSDP if `data_parallel_shard_degree` is above 1 too)."""
    data_parallel_shard_degree: Annotated[int, positive_or_minus_one()] = -1
    """Ranks that shard the weights (FSDP2). -1: all remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a block's gathered weights after its forward. "default": yes, except for the last
    gathered unit (the output, or the last block with tied embeddings), which backward needs at
    once, and not under a pipeline, nor on a single shard, whose weights are only cast."""
    tensor_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that shard each matrix."""
    enable_sequence_parallel: bool = True
    """Sequence parallelism: shard the sequence between the matrices of tensor parallelism
    (torchtitan: always)."""
    disable_loss_parallel: bool = False
    """Compute the loss on unsharded logits under tensor parallelism."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with its matrix products, in compiled blocks.
    Needs GPUs that reach each other's memory."""
    pipeline_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks of the pipeline, which partition the layers."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble or DualPipeV. The last five have several stages per rank."""
    pipeline_parallel_microbatch_size: Annotated[int, at_least(1)] = 1
    """Samples per microbatch of the pipeline, in place of `training.local_batch_size`: all samples
    of a rank and step pass the pipeline in one run."""
    pipeline_parallel_first_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Layers by which the first stage is shorter, because it has the embedding."""
    pipeline_parallel_last_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Layers by which the last stage is shorter, because it has the output."""
    pipeline_parallel_layers_per_stage: Annotated[int, at_least(1)] | None = None
    """Layers per stage. Unset: one or two stages per rank, as the schedule needs."""
    pipeline_parallel_schedule_csv: str | None = ""
    """File with a custom schedule in torch's CSV form, in place of `pipeline_parallel_schedule`: a
    row per rank with its actions in order, such as 0F3 for stage 0, forward, microbatch 3; B
    backward, or I and W its parts for input and weights. It determines the stages of each rank and
    the number of microbatches per step."""
    pipeline_parallel_expert_parallel_overlap: Annotated[
        bool, only(True, "a schedule other than the chosen one, without the overlap of experts,")
    ] = True
    """Only true is accepted: the schedule or the file determines what overlaps."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names per stage, in the order of forward."""
    context_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that shard each sequence."""
    context_parallel_load_balancer: Literal["headtail", "ptrr"] | None = "headtail"
    """How a sequence is sharded. "headtail": each rank has a chunk from its head and one from its
    tail, which balances causal attention. "none": one chunk each. "ptrr" is not supported by this
    version."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = "allgather"
    """"allgather": keys and values are gathered. "alltoall": they travel in a ring, which needs the
    least memory and does not support document masks. "ulysses" (not in torchtitan): heads are
    exchanged for positions; the degree must divide the heads of each tensor-parallel rank."""
    expert_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that shard the experts. Times `expert_tensor_parallel_degree` it must divide the
    product of the degrees of data_parallel_shard, context and tensor."""
    expert_tensor_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that shard each expert's matrices; `tensor_parallel_degree` does not."""
    expert_parallel_comm_backend: Annotated[str, only("standard", "another exchange of tokens")] = (
        "standard"
    )
    """How tokens are dispatched to experts: torch's all-to-all."""
