"""How a model runs on a mesh: one file per technique, each with one `apply`.

A technique at degree 1, or switched off, is the identity. No file here names a model: all that
they know of one is its ModelSpec. Layer: above nn, redistribute, mesh and spec.
"""

from torch import nn

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.parallel import (
    activation_checkpoint,
    compiling,
    context,
    expert,
    float8,
    fsdp,
    tensor,
)
from torchtitan_lite.parallel.schedule import OneStage, build_schedule
from torchtitan_lite.schema.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.schema.compile import CompileConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.schema.quantize import Float8Config
from torchtitan_lite.schema.training import PrecisionConfig
from torchtitan_lite.spec import ModelSpec

__all__ = [
    "OneStage",
    "build_schedule",
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
    """Apply every technique to a model on the meta device, in the one order that works.

    Tensors are cut first, so that all else sees the modules as they will run; experts before the
    rest, which is held whole where no rule cuts it. Modules are exchanged before all.
    Recomputation of chosen operations goes inside the compiled region, because the compiler carries
    out the choice. That of whole blocks goes outside: inside it fails with tensor parallelism
    (torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors, got DeviceMesh"), and the
    compiler could not fuse across it. Sharding goes outside both, so that its collectives stay out
    of the graph.
    """
    float8.apply(model, spec, quantization)
    expert.apply(model, spec, mesh, parallelism)
    tensor.apply(model, spec, mesh, parallelism)
    context.apply(model, mesh, parallelism)
    activation_checkpoint.apply_to_operations(
        model,
        spec,
        checkpointing,
        repeatable=mesh.degrees.pp > 1 and not compilation.covers("model"),
    )
    compiling.apply(model, spec, mesh, compilation)
    activation_checkpoint.apply_to_blocks(model, spec, checkpointing)
    fsdp.apply(model, spec, mesh, parallelism, precision)
