"""Initial weights that do not depend on the mesh.

Each number of a parameter is a function of the seed, the parameter's name and its row block. A rank
draws the row blocks that its box touches and keeps its part of them, so every mesh starts from the
same bits.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtitan_lite.core.rng import generator
from torchtitan_lite.distributed.redistribute import Box, local_box
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.spec import InitRule

_ELEMENTS_PER_BLOCK = 1 << 18
"""Rows per block. Another value gives other initial weights."""


@torch.no_grad()
def initialize(model: nn.Module, rules: Sequence[InitRule], seed: int) -> None:
    """Initialize every parameter of `model` by its first matching rule. Raises LookupError if no
    rule matches."""
    draws: list[_Draw] = []
    for name, parameter in model.named_parameters():
        rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)
        if rule is None:
            raise LookupError(f"No InitRule matches parameter {name}. Add one to the ModelSpec.")
        local = local_tensor(parameter)
        if rule.kind in ("normal", "log_uniform", "fan_in_uniform"):
            box = local_box(parameter)
            if not box.is_empty:
                draws += _draws(name, parameter.shape, box, rule, seed, local)
        else:
            local.fill_(1.0 if rule.kind == "ones" else 0.0)
    threads_before = torch.get_num_threads()
    # The draws are parallel, not the operations in them.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(_num_threads(), "initialize") as pool:
            for _ in pool.map(_Draw.run, draws):
                pass
    finally:
        torch.set_num_threads(threads_before)


def _num_threads() -> int:
    """Return this rank's share of the node's cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def on_meta(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Build the model in `dtype` on the meta device."""
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _WithoutInit():
            return build()
    finally:
        torch.set_default_dtype(dtype_before)


class _WithoutInit(TorchFunctionMode):
    """Skips `torch.nn.init`. On the meta device it runs in Python, and the first call imports the
    compiler, which takes half a second (torch 2.13)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor of an initialization as it is; other functions run."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)


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
    """Draw the values of one box of a randomly drawn parameter of global `shape`, float32."""
    values = torch.empty(box.size)
    for draw in _draws(name, shape, box, rule, seed, values):
        draw.run()
    return values


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """One row block of a parameter, of which a rank keeps a part."""

    shape: tuple[int, ...]
    """Of the block."""
    rule: InitRule
    key: tuple[int, str, str, int]
    kept: tuple[slice, ...]
    target: torch.Tensor
    """The memory of the kept part, on any device."""

    @torch.no_grad()
    def run(self) -> None:
        """Draw the block, and copy the kept part; the host does not wait for a device."""
        rows = torch.empty(self.shape)
        rule, keyed = self.rule, generator(*self.key)
        if rule.kind == "normal":
            _truncated_normal_(rows, rule.std, rule.std * rule.cutoff_stds, keyed)
        elif rule.kind == "log_uniform":
            rows.uniform_(rule.low, rule.high, generator=keyed).log_()
        else:
            bound = self.shape[-1] ** -0.5
            rows.uniform_(-bound, bound, generator=keyed)
        kept = rows[self.kept]
        if self.target.is_cuda:
            # torch does not reuse page-locked memory before the copy from it has ended.
            staged = torch.empty(kept.shape, dtype=self.target.dtype, pin_memory=True)
            kept = staged.copy_(kept)
        self.target.copy_(kept, non_blocking=True)


def _draws(
    name: str, shape: Sequence[int], box: Box, rule: InitRule, seed: int, values: torch.Tensor
) -> Iterator[_Draw]:
    """Yield the draws that fill `values`, the memory of a box."""
    row_elements = max(1, math.prod(shape[1:]))
    block_rows = max(1, _ELEMENTS_PER_BLOCK // row_elements)
    first_row, end_row = box.offset[0], box.offset[0] + box.size[0]
    for block in range(first_row // block_rows, -(-end_row // block_rows)):
        start = block * block_rows
        stop = min(start + block_rows, shape[0])
        first, end = max(start, first_row), min(stop, end_row)
        yield _Draw(
            shape=(stop - start, *shape[1:]),
            rule=rule,
            key=(seed, "init", name, block),
            kept=(slice(first - start, end - start), *box.slices[1:]),
            target=values[first - first_row : end - first_row],
        )


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
