"""Parallelism: one module per technique, each with an `apply` that `parallelize` calls.

Pipeline parallelism splits the model before (`pipeline_stages`) and runs its parts afterwards
(`pipeline_schedule`). A technique of degree 1, or switched off, is the identity. No module here
names a model: each works from its ModelSpec.
"""

from torch import nn

from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.quantize import Float8Config
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel import (
    activation_checkpoint,
    compile,
    context,
    expert,
    float8,
    fsdp,
    tensor,
)
from torchtitan_lite.parallel.pipeline_schedule import GradientAccumulation, build_pipeline_schedule

__all__ = [
    "GradientAccumulation",
    "build_pipeline_schedule",
    "parallelize",
]


def parallelize(
    model: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    *,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
    quantization: Float8Config | None = None,
) -> None:
    """Apply every technique to a model on the meta device.

    The order matters. Modules are replaced first (float8), then parameters sharded: experts before
    the rest, because tensor parallelism replicates what no rule matches. Selective activation
    checkpointing per operation goes inside the compiled region, because the compiler carries out
    its policy. Checkpointing of entire blocks goes outside: inside it fails with tensor parallelism
    (torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors, got DeviceMesh"), and the
    compiler could not fuse across it. FSDP goes outside both, so that its collectives stay out of
    the graph.
    """
    untrained = {
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    }
    float8.apply(model, spec, quantization)
    expert.apply(model, spec, mesh, parallelism)
    tensor.apply(model, spec, mesh, parallelism)
    for name, parameter in model.named_parameters():
        # Sharding makes new parameters.
        parameter.requires_grad_(name not in untrained)
    context.apply(model, mesh, parallelism)
    activation_checkpoint.apply_to_operations(
        model,
        spec,
        checkpointing,
        repeatable=mesh.degrees.pp > 1 and not compilation.covers("model"),
    )
    compile.apply(model, spec, mesh, compilation)
    activation_checkpoint.apply_to_blocks(model, spec, checkpointing)
    fsdp.apply(model, spec, mesh, parallelism, precision)
