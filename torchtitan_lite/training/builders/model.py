"""Build this rank's parts of the model: on the meta device, parallelized, then in memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from torchtitan_lite.config import Config
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.distributed.device import Device
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.attention import Attention, AttentionMask, Causal
from torchtitan_lite.nn.attention_scores import SoftCapKernel
from torchtitan_lite.nn.attention_sinks import SinkKernel
from torchtitan_lite.nn.initialize import allocate_memory, initialize, on_meta
from torchtitan_lite.nn.spec import ModelCost, ModelSpec
from torchtitan_lite.parallel import parallelize
from torchtitan_lite.parallel.pipeline_stages import keep_only, plan_stages, stage_modules
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.parallel.tensor import check_plan
from torchtitan_lite.training.trained_model import trained_spec

_MIN_FLEX_HEAD_DIM = 16
"""FlexAttention's kernel takes no narrower heads."""


def spec_on_device(config: Config, device: Device) -> ModelSpec:
    """Return the model with the attention kernel for this device, unless one is configured.

    With a mask in memory and grouped heads, torch's attention materializes all scores of a GPU, and
    so does attention with sinks, so that documents, windows, chunks and sinks take FlexAttention
    there.
    """
    spec = trained_spec(config)
    is_chosen = config.model.attention_backend != "auto" or config.debug.trace_communication
    if device.kind != "cuda" or is_chosen:
        return spec
    modules = list(model_on_meta(config, spec).modules())
    if not (spec.document_mask or any(map(_needs_scores, modules))):
        return spec
    head_dims = [module.head_dim for module in modules if isinstance(module, Attention)]
    is_wide = precision_policy(config.training, device).compute.itemsize > torch.float32.itemsize
    if is_wide or min(head_dims, default=0) < _MIN_FLEX_HEAD_DIM:
        return spec
    model = config.model.model_copy(update={"attention_backend": "flex"})
    return trained_spec(config.model_copy(update={"model": model}))


def with_counted_parameters(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with a cost that has the number of parameters of its module. Warn if the
    family states another number."""
    counted = sum(parameter.numel() for parameter in model_on_meta(config, spec).parameters())
    stated = spec.cost
    if (num_stated := stated(config.training.seq_len).num_params) == counted:
        return spec
    warn_on_rank_0(
        "The model family %s states %s parameters for %s, but its module has %s, which are used.",
        spec.name,
        f"{num_stated:,}",
        spec.flavor,
        f"{counted:,}",
    )

    def cost(seq_len: int) -> ModelCost:
        stated_cost = stated(seq_len)
        is_dense = stated_cost.num_active_params == stated_cost.num_params
        return replace(
            stated_cost,
            num_params=counted,
            num_active_params=counted if is_dense else stated_cost.num_active_params,
        )

    return replace(spec, cost=cost)


def _needs_scores(module: nn.Module) -> bool:
    """Whether torch's attention would materialize scores for this part of a model on a GPU."""
    is_masked = isinstance(module, AttentionMask) and module.kind != Causal()
    return is_masked or isinstance(module, SinkKernel | SoftCapKernel)


def build_model(
    config: Config, spec: ModelSpec, mesh: Mesh, *, init_weights: bool = True
) -> list[nn.Module]:
    """Build this rank's parts of the model: one, or one per pipeline stage on this rank. Without
    `init_weights`, the weights are uninitialized memory to load into."""
    parts = parallelized_parts(config, spec, mesh)
    for part in parts:
        materialize(part, config, mesh)
        if init_weights:
            initialize(part, spec.init, config.debug.seed or 0)
    return parts


def parallelized_parts(
    config: Config,
    spec: ModelSpec,
    mesh: Mesh,
    *,
    kept: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> list[nn.Module]:
    """Build this rank's parts of the model, parallelized, on the meta device. `kept` chooses from
    the units of each part; None: all."""
    whole = model_on_meta(config, spec)
    check_plan(whole, spec)
    if config.model.print_after_conversion:
        logger.info("%s", whole)
    if mesh.degrees.pp == 1:
        if kept is not None and spec.stage_units:
            keep_only(whole, spec, kept(spec.stage_units))
        _parallelize(whole, config, spec, mesh)
        return [whole]
    plan = plan_stages(spec, config.parallelism)
    parts = []
    for stage in plan.of_rank(mesh.device_mesh.get_local_rank("pp")):
        part = model_on_meta(config, spec)
        units = stage_modules(plan, spec, stage)
        keep_only(part, spec, units if kept is None else kept(units))
        _parallelize(part, config, spec, mesh)
        parts.append(part)
    return parts


def materialize(part: nn.Module, config: Config, mesh: Mesh) -> None:
    """Allocate the memory of a part of the model that is on the meta device."""
    device = mesh.device.torch_device
    offloaded = config.training.enable_cpu_offload
    allocate_memory(part, torch.device("cpu") if offloaded else device, buffer_device=device)
    part.train()


def model_on_meta(config: Config, spec: ModelSpec) -> nn.Module:
    """Build the entire model on the meta device."""
    return on_meta(spec.build, getattr(torch, config.training.dtype))


def _parallelize(model: nn.Module, config: Config, spec: ModelSpec, mesh: Mesh) -> None:
    parallelize(
        model,
        spec,
        mesh,
        parallelism=config.parallelism,
        precision=config.training,
        checkpointing=config.activation_checkpoint,
        compilation=config.compile,
        quantization=config.quantize.linear.float8 if config.model.uses_float8 else None,
    )
