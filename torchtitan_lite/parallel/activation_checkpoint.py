"""Activation checkpointing: trade memory for computing some activations again in backward.

Layer: above spec.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchtitan_lite.nn.grouped_linear  # noqa: F401 (registers its operator)
from torchtitan_lite.parallel.blocks import blocks_of
from torchtitan_lite.schema.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.spec import ModelSpec
from torchtitan_lite.torch_compat import ATTENTION_OPS

_aten = torch.ops.aten
_MATRIX_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.linear.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    torch.ops.torchtitan_lite.grouped_linear.default,
}


def apply(model: nn.Module, spec: ModelSpec, config: ActivationCheckpointConfig) -> None:
    """Wrap the forward of the blocks that `config` names; parameter names stay as they are."""
    if config.mode == "none":
        return
    every = 1
    context_fn = None
    if config.mode == "selective":
        if config.selective_ac_option == "op":
            context_fn = partial(_selective_contexts, _recomputed_shapes(model, config))
        else:
            every = int(config.selective_ac_option)
    for position, block in enumerate(blocks_of(model, spec)):
        if (position + 1) % every:
            continue
        arguments: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": config.preserve_rng_state,
            "determinism_check": config.determinism_check,
            "debug": config.debug,
            "early_stop": config.early_stop,
        }
        if context_fn is not None:
            arguments["context_fn"] = context_fn
        block.forward = partial(checkpoint, block.forward, **arguments)


def _selective_contexts(recomputed_shapes: set[tuple[int, ...]]) -> Any:
    return create_selective_checkpoint_contexts(_policy(recomputed_shapes))


def _policy(recomputed_shapes: set[tuple[int, ...]]) -> Callable[..., CheckpointPolicy]:
    """Save attention and every other matrix product; compute the rest again.

    Forward and recomputation count their products apart, so that both decide alike.
    """
    counts = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATRIX_PRODUCTS:
            matrix = args[1] if op is not _aten.addmm.default else args[2]
            if tuple(matrix.shape) in recomputed_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _recomputed_shapes(
    model: nn.Module, config: ActivationCheckpointConfig
) -> set[tuple[int, ...]]:
    """Shapes, as the right operand of a product, of the linears that are always recomputed."""
    # torchtitan calls the block of the experts `moe`.
    names = [
        name.removeprefix("moe.") for name in config.per_op_sac_force_recompute_mm_shapes_by_fqns
    ]
    return {
        (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in names)
    }
