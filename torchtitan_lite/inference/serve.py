"""A model that is filled from files and cut by tensor parallelism alone, so that it gives text.
Layer: above parallel, nn, checkpoint and train_state; `weights`.
"""

import torch
from torch import nn

from torchtitan_lite.checkpoint.loader import load
from torchtitan_lite.inference.weights import Weights
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.initialize import give_memory, on_meta
from torchtitan_lite.parallel import serving
from torchtitan_lite.train_state import model_tensors


def serve(
    weights: Weights, mesh: Mesh, *, dtype: torch.dtype | None, tensor_parallel: int | None
) -> tuple[nn.Module, Mesh]:
    """The model, in `dtype` or that of the files, and the mesh that it lies on: copies of it, each
    cut over `tensor_parallel` ranks or as many as can share it. Every rank must call it.

    Raises MeshError where so many cannot share it, and CheckpointError where the files do not fit.
    """
    spec = weights.spec
    degrees = serving.serving_degrees(spec, mesh.world_size, tensor_parallel)
    serving_mesh = mesh.seen_as(degrees)
    model = on_meta(spec.build, dtype or weights.dtype)
    serving.apply(model, spec, serving_mesh)
    give_memory(model, mesh.device.torch_device)
    load(weights.snapshot, model_tensors(model), {"model"}, serving_mesh)
    return model.requires_grad_(False).eval(), serving_mesh
