"""The gated feed-forward block (arXiv:2002.05202), and what a spec says of any kind of block."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.nn.spec import InitRule, ShardRule

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class FeedForwardDims(Protocol):
    """Dimensions of a kind of feed-forward block: a frozen dataclass. Names of parameters are
    relative to the module that `build` returns."""

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        """Styles of tensor parallelism."""
        ...

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        """(description, size): sizes that the degree of tensor parallelism must divide."""
        ...

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        """Initialization where it is not that of all matrices and norms of a decoder."""
        ...

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        """Parameters whose initial values shrink with depth."""
        ...

    def num_params(self, dim: int) -> int:
        """Return the parameters of a block of model width `dim`."""
        ...

    def num_active_params(self, dim: int) -> int:
        """Return the parameters that a token passes through."""
        ...

    def build(self, dim: int) -> nn.Module:
        """Build the module, [B, S, D] -> [B, S, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Dimensions of a `FeedForward`."""

    hidden_dim: int
    activation: Activation = "silu"

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        return (
            ShardRule(pattern="w[13].weight", style="columns"),
            ShardRule(pattern="w2.weight", style="rows"),
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("features of the feed-forward block", self.hidden_dim),)

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        return ()

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        return ("w2.weight", "w3.weight")

    def num_params(self, dim: int) -> int:
        return 3 * dim * self.hidden_dim

    def num_active_params(self, dim: int) -> int:
        return self.num_params(dim)

    def build(self, dim: int) -> "FeedForward":
        return FeedForward(dim, self.hidden_dim, self.activation)


class FeedForward(nn.Module):
    """w2(activation(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int, activation: Activation = "silu") -> None:
        super().__init__()
        self._activation = _ACTIVATIONS[activation]
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.w2(self._activation(self.w1(x_BSD)) * self.w3(x_BSD))
