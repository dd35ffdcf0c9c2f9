"""Linear layers in float8, by torchao (arXiv:2209.05433)."""

from dataclasses import replace

import torch
from torch import nn

from torchtitan_lite.config.tables.quantize import Float8Config
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.optional_dependencies import missing
from torchtitan_lite.nn.spec import ModelSpec, blocks_of

_MULTIPLE = 16
"""Float8 kernels require dims that are multiples of this."""
_ROUTER = "router.gate"


def apply(model: nn.Module, spec: ModelSpec, config: Float8Config | None) -> None:
    """Replace every `nn.Linear` in the blocks of `model` whose sizes fit by torchao's float8
    linear, except routers, which need more precision, and those in `config.filter_fqns`. Parameters
    keep their names and dtypes."""
    if config is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig()
    if config.recipe_name is not None:
        recipe = Float8LinearConfig.from_recipe_name(config.recipe_name)
    recipe = replace(recipe, emulate=config.emulate)
    kept_out = (_ROUTER, *config.filter_fqns)
    blocks = blocks_of(model, spec)
    chosen = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(part in name for part in kept_out)
        and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
        and any(module is inner for block in blocks for inner in block.modules())
    }
    for block in blocks:
        convert_to_float8_training(
            block, config=recipe, module_filter_fn=lambda module, _: id(module) in chosen
        )
    logger.info("%d linear layers compute in float8.", len(chosen))


def unsupported_reason(
    config: Float8Config, *, on_gpu: bool, tensor_parallel_degree: int
) -> str | None:
    """Return why float8 is not supported here and what to change; None if it is."""
    if error := missing("torchao", "float8"):
        return error.rstrip(".")
    if tensor_parallel_degree > 1:
        return (
            "float8 linears do not support tensor parallelism. Set tensor_parallel_degree = 1 "
            f"(given: {tensor_parallel_degree})"
        )
    if config.emulate:
        return None
    remedy = "Set model.converters = [], or emulate = true, which is slow and for tests"
    if not on_gpu:
        return f"there is no GPU to compute in float8. {remedy}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return (
            f"float8 needs a GPU of compute capability 8.9 or above, and this one has "
            f"{major}.{minor}. {remedy}"
        )
    return None
