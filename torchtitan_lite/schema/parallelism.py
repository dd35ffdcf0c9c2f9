"""The [parallelism] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import Section, at_least, only, positive_or_minus_one


class ParallelismConfig(Section):
    """Degrees of each parallelism. Their product is the number of processes."""

    data_parallel_replicate_degree: Annotated[int, at_least(1)] = 1
    """Copies of the weights (HSDP when `data_parallel_shard_degree` is above 1 too)."""
    data_parallel_shard_degree: Annotated[int, positive_or_minus_one()] = -1
    """Ranks that share one copy of the weights (FSDP2). -1: all ranks that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a block's gathered weights after its forward. "default": yes, but for the last unit that
    is gathered (the output, or the last block when embeddings are tied), which backward needs at
    once, and not at all under a pipeline."""
    tensor_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that share each matrix."""
    enable_sequence_parallel: bool = True
    """Between the matrices that tensor parallelism cuts, let each rank work on its part of the
    sequence (torchtitan: always)."""
    disable_loss_parallel: bool = False
    """Compute the loss on whole logits under tensor parallelism."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with its matrix products, in compiled blocks.
    Needs GPUs that reach each other's memory."""
    pipeline_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that share the layers."""
    pipeline_parallel_schedule: str = "1F1B"
    """Order of forward and backward over the stages: 1F1B, GPipe, Interleaved1F1B, LoopedBFS,
    InterleavedZeroBubble, ZBVZeroBubble or DualPipeV. The last five hold several stages a rank."""
    pipeline_parallel_microbatch_size: Annotated[int, at_least(1)] = 1
    """Samples in a microbatch of the pipeline, in the place of `training.local_batch_size`: all
    samples of a step that a rank has go through the pipeline in one run."""
    pipeline_parallel_first_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Layers that the first stage has fewer, since it holds the embedding."""
    pipeline_parallel_last_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Layers that the last stage has fewer, since it holds the output."""
    pipeline_parallel_layers_per_stage: Annotated[int, at_least(1)] | None = None
    """Layers in a stage. Unset: one or two stages a rank, as the schedule needs."""
    pipeline_parallel_schedule_csv: str | None = ""
    """File with a schedule of your own, which takes the place of `pipeline_parallel_schedule`, in
    torch's CSV form: a row a rank, its actions in order, such as 0F3 for stage 0, forward,
    microbatch 3; B backward, or I and W its parts for input and weights. Which rank holds which
    stages is read off it, and a step must give as many microbatches as it has."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """Accepted and without effect: the order of a step is the schedule's or the file's."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, in the order of forward."""
    context_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that share each sequence."""
    context_parallel_load_balancer: Literal["headtail", "ptrr"] | None = "headtail"
    """How a sequence is cut. "headtail": each rank has a piece from its head and one from its tail,
    so that causal attention costs every rank the same. "none": one piece each. "ptrr" is not
    supported by this version."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = "allgather"
    """"allgather": keys and values are gathered. "alltoall": they go round in a ring, which needs
    the least memory and cannot keep to documents. "ulysses" (not in torchtitan): heads are
    exchanged for positions, which needs as many heads as ranks."""
    expert_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that share the experts of a mixture: of those that share the weights otherwise, so
    that it times `expert_tensor_parallel_degree` divides the product of the degrees of
    data_parallel_shard, context and tensor."""
    expert_tensor_parallel_degree: Annotated[int, at_least(1)] = 1
    """Ranks that share each expert's matrices; `tensor_parallel_degree` does not cut them."""
    expert_parallel_comm_backend: Annotated[str, only("standard", "another exchange of tokens")] = (
        "standard"
    )
    """How tokens travel to their experts: in torch's all-to-all."""
