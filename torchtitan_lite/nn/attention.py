"""Self-attention as decoders, parallelism and the KV cache see it: dimensions, module, masks and
kernels.

A kind of attention is one file: a frozen dataclass of dimensions (`AttentionDims`) that describes a
module (`Attention`). Its forward has three parts: project the input to queries and states, exchange
states with other positions, attend. Context parallelism and the KV cache replace the middle part or
the kernel, and know nothing else of the kind.

A recurrence (`nn.recurrent`) mixes the positions of a block in another way, and is a kind of
attention only in that it is described by `AttentionDims`.

Two kernels: torch's scaled_dot_product_attention runs anywhere; FlexAttention needs a GPU (it has
no backward on the CPU in torch 2.13) and skips the blocks that a document mask empties.

Beside the legend in `spec.py`: G width of a value head, where it differs from E
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import AttentionSharding, HuggingFaceForm, InitRule, ShardRule

Backend = Literal["sdpa", "flex"]
States = tuple[torch.Tensor, ...]
"""What positions offer to the queries of later ones, tensors [B, ..., S, width]; for grouped-query
attention their keys and values."""


class MaskKind(Protocol):
    """The positions that a query attends to: a frozen dataclass, by which layers share a mask."""

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether queries attend to keys, bool, by their positions, which broadcast."""
        ...


@dataclass(frozen=True)
class Causal:
    """All positions up to the query's own."""

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return queries >= keys


@dataclass(frozen=True)
class SlidingWindow:
    """The last `size` positions up to the query's own."""

    size: int

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (queries >= keys) & (queries - keys < self.size)


@dataclass(frozen=True)
class ChunkWindow:
    """Positions of the query's own chunk, up to its own; chunks have `size` positions each."""

    size: int

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (queries >= keys) & (queries // self.size == keys // self.size)


@dataclass(frozen=True)
class BlockContext:
    """What a block needs beside its input; the rotations and the mask are created once per forward
    and kind of attention. The rotations are float32 in any precision."""

    cos_BS1E: torch.Tensor | None
    """None without rotary embedding."""
    sin_BS1E: torch.Tensor | None
    mask: Any
    """None for plain causal attention; else a bool tensor [B, 1, S, S] or a Flex BlockMask."""
    positions_BS: torch.Tensor
    """Those of attention: under sequence parallelism more than the block's input has."""
    rng_keys_B: torch.Tensor
    """int64 key of each sample for random draws in this block, in training: a function of seed,
    step, sample and layer. See `nn.draws`."""
    documents_BS: torch.Tensor | None = None
    """Documents of entire sequences, for kinds without a mask."""


@dataclass(frozen=True, kw_only=True)
class AttentionDims(ABC):
    """Dimensions of a kind of attention, and everything that the spec of a model says of it. Names
    of parameters are relative to the module that `build` returns."""

    num_heads: int
    """Query heads."""

    @property
    @abstractmethod
    def rope(self) -> Rope | None:
        """Rotary embedding; None: positions matter only for the mask."""

    @property
    def mask(self) -> MaskKind | None:
        """Positions that a query attends to; None for a recurrence."""
        return Causal()

    @property
    @abstractmethod
    def sharding(self) -> AttentionSharding:
        """What parallelism may do with it."""

    @property
    @abstractmethod
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        """(description, size): sizes that the degree of tensor parallelism must divide."""

    @property
    @abstractmethod
    def shard_rules(self) -> tuple[ShardRule, ...]:
        """Styles of tensor parallelism."""

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        """Initialization where it is not that of all matrices and norms of a decoder."""
        return ()

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        """Matrices that write into the residual stream, whose initial values shrink with depth."""
        return ("wo.weight",)

    @property
    @abstractmethod
    def hugging_face(self) -> Mapping[str, str | HuggingFaceForm]:
        """Names of the parameters in a layer of Hugging Face's transformers, or their forms."""

    @abstractmethod
    def num_matrix_elements(self, dim: int) -> int:
        """Return the elements of all matrices, each of which a token is multiplied by."""

    @abstractmethod
    def num_other_params(self) -> int:
        """Return the number of parameters that are neither in matrices nor biases."""

    def num_biases(self, dim: int) -> int:
        """Return the elements of all biases."""
        return 0

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Return the FLOPs of scores and weighted values, forward and backward, per token."""

    @abstractmethod
    def build(self, dim: int, backend: Backend) -> "TokenMixer":
        """Build the module for hidden states of width `dim`."""


def causal_flops(num_heads: int, widths: int, seq_len: int) -> int:
    """Return the FLOPs per token of causal attention: 6 per pair of positions for each number of a
    query and of a value, half of them masked (arXiv:2204.02311, appendix B). `widths` is the width
    of a head's queries plus that of its values."""
    return 3 * num_heads * widths * seq_len


def own_states(states: States, context: BlockContext) -> States:
    """Return the states of a rank that holds entire sequences, all in one forward."""
    return states


class TokenMixer(nn.Module, ABC):
    """What lets the positions of a sequence interact in a block. [B, S, D] -> [B, S, D]."""

    saved_ops: ClassVar[frozenset[Any]] = frozenset()
    """Operators, beside torch's attention kernels, whose results selective activation checkpointing
    saves."""

    @abstractmethod
    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """Return what the block adds to its input."""


class Attention(TokenMixer):
    """Self-attention. [B, S, D] -> [B, S, D]."""

    kernel: nn.Module
    """Maps queries [B, H, S, E], keys [B, K, S, E], values [B, K, S, G] and a mask to [B, H, S, G].
    Context parallelism may replace it."""
    exchange: Callable[[States, BlockContext], States]
    """Maps the states of this forward's positions to all states that its queries may attend to.
    Context parallelism and the KV cache replace it."""

    def __init__(self, backend: Backend, head_dim: int, scale: float | None = None) -> None:
        """`head_dim` is the width of a query head; `scale` multiplies scores, by default
        1 / sqrt(head_dim)."""
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.kernel = self.make_kernel(backend)
        self.exchange = own_states
        self.is_cached = False

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        queries, states = self.project(x_BSD, context)
        states = self.exchange(states, context)
        attend = self.attend_cached if self.is_cached else self.attend
        return attend(queries, states, context.mask)

    @abstractmethod
    def project(self, x_BSD: torch.Tensor, context: BlockContext) -> tuple[Any, States]:
        """Return the queries and states of the positions of `x_BSD`, rotated."""

    @abstractmethod
    def attend(self, queries: Any, states: States, mask: Any) -> torch.Tensor:
        """Return the output [B, S, D] of queries over states."""

    def attend_cached(self, queries: Any, states: States, mask: torch.Tensor) -> torch.Tensor:
        """`attend` over the states of the KV cache, of which `mask` [B, 1, S, P] selects some; for
        kinds that are faster in another form."""
        return self.attend(queries, states, mask)

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the states of one position on this rank, with the width last."""

    def make_kernel(self, backend: Backend) -> nn.Module:
        """Return a kernel of these scores."""
        return FlexKernel(self.scale) if backend == "flex" else SDPAKernel(self.scale)


class HeadWeights(nn.Module):
    """A weight per head, or per channel of a head. A module, so that tensor parallelism can shard
    it as the heads."""

    def __init__(self, *shape: int) -> None:
        """The first dim is over heads."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> torch.Tensor:
        """Return the weights of this rank's heads."""
        return self.weight


class AcrossHeads(nn.Module):
    """Identity, for a tensor [B, S, ...] that all heads read, as it is or by linears of the style
    `local_columns`. Tensor parallelism gathers it along the sequence, and sums its gradient over
    the heads of all ranks."""

    def forward(self, x_BS: torch.Tensor) -> torch.Tensor:
        return x_BS


class AttentionMask(nn.Module):
    """The mask of a kind of attention, optionally within documents. A module, so that context
    parallelism can replace it."""

    def __init__(self, backend: Backend, kind: MaskKind = Causal()) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.kind = kind

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> Any:
        """Return a bool tensor [B, 1, S, S] or a Flex BlockMask; None if the kernel's causal path
        suffices."""
        length, device = positions_BS.shape[1], positions_BS.device
        if documents_BS is None:
            if self.backend == "flex":
                return _whole_block_mask(length, device, self.kind)
            if self.kind == Causal():
                return None
        everywhere = torch.arange(length, device=device)
        return attention_mask(everywhere, everywhere, documents_BS, self.backend, self.kind)


def attention_mask(
    queries_Q: torch.Tensor,
    keys_K: torch.Tensor,
    documents_BS: torch.Tensor | None,
    backend: Backend,
    kind: MaskKind = Causal(),
) -> Any:
    """Return which keys each query attends to, by their positions in the sequence: a bool tensor
    [B or 1, 1, Q, K], or a Flex BlockMask."""
    if backend == "flex":
        return _visible_blocks(queries_Q, keys_K, documents_BS, kind)
    past = kind.sees(queries_Q[:, None], keys_K)
    if documents_BS is None:
        return past[None, None]
    same = documents_BS[:, queries_Q, None] == documents_BS[:, None, keys_K]
    return (same & past)[:, None]


_SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In order of preference, the same on every GPU and torch version. torch prefers cuDNN's kernel on
Hopper, where it is the fastest, only in newer versions."""


class SDPAKernel(nn.Module):
    """torch's fused attention."""

    def __init__(self, scale: float | None = None) -> None:
        """`scale` multiplies scores, by default 1 / sqrt(width of a query)."""
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSG: torch.Tensor,
        mask_B1SS: torch.Tensor | None,
    ) -> torch.Tensor:
        # On a CPU the context would only cost time.
        chosen = sdpa_kernel(_SDPA_BACKENDS, set_priority=True) if q_BHSE.is_cuda else nullcontext()
        width = v_BKSG.shape[-1]
        if q_BHSE.is_cpu and width < q_BHSE.shape[-1]:
            # The CPU's fused kernel needs equal widths; the other one materializes all scores.
            v_BKSG = F.pad(v_BKSG, (0, q_BHSE.shape[-1] - width))
        with chosen:
            out_BHSG = F.scaled_dot_product_attention(
                q_BHSE,
                k_BKSE,
                v_BKSG,
                attn_mask=mask_B1SS,
                is_causal=mask_B1SS is None,
                scale=self.scale,
                enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
            )
        return out_BHSG[..., :width]


class FlexKernel(nn.Module):
    """FlexAttention, compiled once for the process."""

    def __init__(self, scale: float | None = None) -> None:
        """`scale` multiplies scores, by default 1 / sqrt(width of a query)."""
        super().__init__()
        self.scale = scale

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSG: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        return compiled_flex()(
            q_BHSE, k_BKSE, v_BKSG, block_mask=mask, scale=self.scale, enable_gqa=True
        )


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention, compiled once for the process."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _compiled_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


@cache
def _whole_block_mask(length: int, device: torch.device, kind: MaskKind) -> Any:
    def past(b: Any, h: Any, q: Any, k: Any) -> Any:
        return kind.sees(q, k)

    return _compiled_block_mask()(past, None, None, length, length, device=device)


def _visible_blocks(
    queries_Q: torch.Tensor,
    keys_K: torch.Tensor,
    documents_BS: torch.Tensor | None,
    kind: MaskKind,
) -> Any:
    def past(b: Any, h: Any, q: Any, k: Any) -> Any:
        return kind.sees(queries_Q[q], keys_K[k])

    def same_document_past(b: Any, h: Any, q: Any, k: Any) -> Any:
        assert documents_BS is not None
        same = documents_BS[b, queries_Q[q]] == documents_BS[b, keys_K[k]]
        return same & kind.sees(queries_Q[q], keys_K[k])

    batch = None if documents_BS is None else len(documents_BS)
    return _compiled_block_mask()(
        past if documents_BS is None else same_document_past,
        batch,
        None,
        len(queries_Q),
        len(keys_K),
        device=queries_Q.device,
    )
