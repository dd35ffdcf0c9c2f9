"""Initial weights that do not depend on the mesh.

Each number of a parameter is a function of the seed, the parameter's name and its row block. A rank
draws the row blocks that its box touches and keeps its part of them, so every mesh starts from the
same bits. Layer: above redistribute and spec.
"""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from torchtitan_lite.redistribute import Box, local_box
from torchtitan_lite.rng import generator
from torchtitan_lite.spec import InitRule
from torchtitan_lite.torch_compat import local_tensor

_ELEMENTS_PER_BLOCK = 1 << 18
"""Rows per block. Another value gives other initial weights."""


@torch.no_grad()
def initialize(model: nn.Module, rules: Sequence[InitRule], seed: int) -> None:
    """Initialize every parameter of `model` by its first matching rule. Raises LookupError if no
    rule matches."""
    for name, parameter in model.named_parameters():
        rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)
        if rule is None:
            raise LookupError(f"No InitRule matches parameter {name}. Add one to the ModelSpec.")
        local = local_tensor(parameter)
        if rule.kind == "normal":
            box = local_box(parameter)
            if not box.is_empty:
                local.copy_(draw_box(name, parameter.shape, box, rule, seed))
        else:
            local.fill_(1.0 if rule.kind == "ones" else 0.0)


def on_meta(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Build the model in `dtype` on the meta device."""
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return build()
    finally:
        torch.set_default_dtype(dtype_before)


def allocate_memory(
    model: nn.Module, device: torch.device, buffer_device: torch.device | None = None
) -> None:
    """Move a model from the meta device to `device`, with uninitialized parameters. Buffers are
    computed on the CPU when the module is created, and move to `buffer_device` with their values.
    """
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        # to_empty forgets them.
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer.to(buffer_device or device))


def draw_box(name: str, shape: Sequence[int], box: Box, rule: InitRule, seed: int) -> torch.Tensor:
    """Draw the values of one box of a normally distributed parameter of global `shape`, float32."""
    row_elements = max(1, math.prod(shape[1:]))
    block_rows = max(1, _ELEMENTS_PER_BLOCK // row_elements)
    first_row, num_rows = box.offset[0], box.size[0]
    cutoff = rule.std * rule.cutoff_stds
    parts = []
    for block in range(first_row // block_rows, -(-(first_row + num_rows) // block_rows)):
        start = block * block_rows
        rows = torch.empty(min(block_rows, shape[0] - start), *shape[1:])
        _truncated_normal_(rows, rule.std, cutoff, generator(seed, "init", name, block))
        inside = slice(max(first_row - start, 0), first_row + num_rows - start)
        parts.append(rows[(inside, *box.slices[1:])])
    return torch.cat(parts)


def _truncated_normal_(
    rows: torch.Tensor, std: float, cutoff: float, keyed: torch.Generator
) -> None:
    """Fill `rows` with draws of a normal distribution; those beyond `cutoff` are drawn again.

    Equal to `nn.init.trunc_normal_` of torch 2.12 and later for cutoffs above 0.4 standard
    deviations. That of 2.11 draws other values.
    """
    rows.normal_(0.0, std, generator=keyed)
    flat = rows.view(-1)
    again = (flat.abs() > cutoff).nonzero().squeeze(1)
    while len(again):
        # Each round draws a value for every place, of which few are used.
        drawn = torch.empty_like(flat).normal_(0.0, std, generator=keyed)[again]
        flat[again] = drawn
        again = again[drawn.abs() > cutoff]
