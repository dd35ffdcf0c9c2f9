"""Activation checkpointing: recompute activations in backward instead of saving them."""

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
from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.distributed.torch_compat import ATTENTION_OPS, RepeatableRecomputation
from torchtitan_lite.nn.attention import TokenMixer
from torchtitan_lite.nn.spec import ModelSpec, blocks_of

_aten = torch.ops.aten
_MATRIX_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.linear.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    torch.ops.torchtitan_lite.grouped_linear.default,
}


def apply_to_operations(
    model: nn.Module, spec: ModelSpec, config: ActivationCheckpointConfig, *, repeatable: bool
) -> None:
    """Wrap the forward of every block if `config` selects operations; parameter names do not
    change.

    `repeatable`: a block may be recomputed more than once per forward, as pipeline schedules that
    split the backward do. The compiler cannot trace it.
    """
    if not _chooses_operations(config):
        return
    contexts = partial(_contexts, _saved_ops(model), _recomputed_shapes(model, config), repeatable)
    for block in blocks_of(model, spec):
        _wrap(block, config, context_fn=contexts)


def apply_to_blocks(model: nn.Module, spec: ModelSpec, config: ActivationCheckpointConfig) -> None:
    """Wrap the forward of the blocks that `config` selects; parameter names do not change."""
    if config.mode not in ("full", "selective") or _chooses_operations(config):
        return
    every = 1 if config.mode == "full" else int(config.selective_ac_option)
    # Counted within the stage: stages of equal length recompute equally many blocks.
    for number, block in enumerate(blocks_of(model, spec), start=1):
        if number % every == 0:
            _wrap(block, config)


def _chooses_operations(config: ActivationCheckpointConfig) -> bool:
    return config.mode == "selective" and config.selective_ac_option == "op"


def _wrap(block: nn.Module, config: ActivationCheckpointConfig, **arguments: Any) -> None:
    block.forward = partial(
        checkpoint,
        block.forward,
        use_reentrant=False,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
        debug=config.debug,
        early_stop=config.early_stop,
        **arguments,
    )


def _contexts(
    saved_ops: set[Any], recomputed_shapes: set[tuple[int, ...]], repeatable: bool
) -> tuple[Any, Any]:
    """Return the context managers of a block's forward and of its recomputation."""
    forward, recomputation = create_selective_checkpoint_contexts(
        _policy(saved_ops, recomputed_shapes)
    )
    return forward, RepeatableRecomputation(recomputation) if repeatable else recomputation


def _saved_ops(model: nn.Module) -> set[Any]:
    """Return the operators that attention consists of: torch's kernels, and others that the model's
    kinds of attention name."""
    named = (module.saved_ops for module in model.modules() if isinstance(module, TokenMixer))
    return ATTENTION_OPS.union(*named)


def _policy(
    saved_ops: set[Any], recomputed_shapes: set[tuple[int, ...]]
) -> Callable[..., CheckpointPolicy]:
    """Save attention and every second matrix product; recompute the rest (torchtitan's policy).

    Forward and recomputation count their products separately, so that both decide alike.
    """
    counts = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in saved_ops:
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
    """Return the shapes, as the right operand of a product, of the linears that are always
    recomputed."""
    # torchtitan calls the block of the experts `moe`.
    names = [
        name.removeprefix("moe.") for name in config.per_op_sac_force_recompute_mm_shapes_by_fqns
    ]
    return {
        (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in names)
    }
