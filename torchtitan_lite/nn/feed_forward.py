"""The feed-forward block, gated (arXiv:2002.05202) or plain, and what a spec says of any kind of
block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.nn.spec import InitRule, ShardRule, linear_parameters

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu_squared"]


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    """The square of the positive part (arXiv:2109.08668)."""
    return F.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": _relu_squared,
}


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
    gated: bool = True
    """Whether the activation multiplies a second projection."""
    bias: bool = False
    """Whether the projections have biases."""

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        kinds = linear_parameters(self.bias)
        inward = "w[13]" if self.gated else "w1"
        return (
            *(ShardRule(pattern=f"{inward}.{kind}", style="columns") for kind in kinds),
            *(ShardRule(pattern=f"w2.{kind}", style="rows") for kind in kinds),
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("features of the feed-forward block", self.hidden_dim),)

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        return (InitRule(pattern="w?.bias", kind="zeros"),) if self.bias else ()

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        return ("w2.weight", "w3.weight") if self.gated else ("w2.weight",)

    @property
    def projections(self) -> Mapping[str, int]:
        """The linear layers that read the input, and the number of their output features."""
        return dict.fromkeys(("w1", "w3") if self.gated else ("w1",), self.hidden_dim)

    def num_params(self, dim: int) -> int:
        matrices = len(self.projections) + 1
        biases = len(self.projections) * self.hidden_dim + dim
        return matrices * dim * self.hidden_dim + self.bias * biases

    def num_active_params(self, dim: int) -> int:
        return self.num_params(dim)

    def build(self, dim: int) -> "FeedForward":
        return FeedForward(dim, self)


class FeedForward(nn.Module):
    """w2(activation(w1 x) * w3 x), or w2(activation(w1 x))."""

    def __init__(self, dim: int, dims: Dense) -> None:
        super().__init__()
        self._activation = _ACTIVATIONS[dims.activation]
        self.w1 = nn.Linear(dim, dims.hidden_dim, bias=dims.bias)
        self.w2 = nn.Linear(dims.hidden_dim, dim, bias=dims.bias)
        self.w3 = nn.Linear(dim, dims.hidden_dim, bias=dims.bias) if dims.gated else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden_BSF = self._activation(self.w1(x_BSD))
        if self.w3 is not None:
            hidden_BSF = hidden_BSF * self.w3(x_BSD)
        return self.w2(hidden_BSF)
