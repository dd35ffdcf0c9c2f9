"""Gated DeltaNet (arXiv:2412.06464): linear attention whose state forgets by a gate, and replaces
what it has stored under a key.

Each head holds a matrix S. A position with key k, value v, decay a and writing strength b does

    S <- a S;    S <- S + b k (v - k^T S)^T

and reads q^T S. Training computes chunks of positions at once. With d(i, j) the product of the
decays behind position j up to i, and S the state that a chunk begins with, what position i writes
under its key is

    u_i = b_i (v_i - d(i, start) k_i^T S - sum over j < i of d(i, j) (k_i . k_j) u_j),

a triangular system that is linear in S. So a loop over chunks has some products of matrices each,
and the map of S over a chunk is affine. Where documents are kept apart, d is 0 across their bounds.

Beside the legends in `spec.py` and `nn.recurrent`: K key heads H value heads, of which consecutive
ones share a key head G width of a value N chunks of a piece C positions of a chunk T taps of the
convolution
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.attention import AttentionDims, Backend, BlockContext, HeadWeights
from torchtitan_lite.nn.recurrent import AffineMap, Carry, Recurrence
from torchtitan_lite.nn.spec import AttentionSharding, HuggingFaceForm, InitRule, ShardRule

_L2_EPS = 1e-6
"""Added to the squared length of a query or key, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta(AttentionDims):
    """Dimensions of a Gated DeltaNet layer; `num_heads` are those of queries and keys."""

    num_value_heads: int
    """Heads of values and states; equally many consecutive ones share a query and key head."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4
    """Positions that the causal convolution of queries, keys and values reads."""
    norm_eps: float = 1e-6
    """Of the norm of the heads' outputs."""
    chunk_size: int = 64
    """Positions that training computes at once; it does not change the function."""

    def __post_init__(self) -> None:
        names = ("num_heads", "num_value_heads", "key_head_dim", "value_head_dim", "chunk_size")
        wrong = [f"{name} ({getattr(self, name)})" for name in names if getattr(self, name) < 1]
        if wrong:
            raise ConfigError(f"Gated DeltaNet needs sizes above 0: {', '.join(wrong)}.")
        if self.num_value_heads % self.num_heads:
            raise ConfigError(
                f"Gated DeltaNet needs as many value heads ({self.num_value_heads}) as key heads "
                f"({self.num_heads}), or a multiple of them."
            )
        if self.kernel_size < 2:
            raise ConfigError(
                f"The convolution of Gated DeltaNet reads kernel_size ({self.kernel_size}) "
                "positions, which must be at least 2."
            )

    @property
    def rope(self) -> None:
        return None

    @property
    def mask(self) -> None:
        return None

    @property
    def sharding(self) -> AttentionSharding:
        return AttentionSharding(
            name="Gated DeltaNet", num_heads=self.num_heads, carried_inputs=self.kernel_size - 1
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("key heads of Gated DeltaNet", self.num_heads),)

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        # Rows of both projections are by key head, so that a shard has whole heads.
        return (
            ShardRule(pattern="in_proj_*.weight", style="columns"),
            ShardRule(pattern="[qkv]_conv.weight", style="head_weights"),
            ShardRule(pattern="A_log.weight", style="head_weights"),
            ShardRule(pattern="dt_bias.weight", style="head_weights"),
            ShardRule(pattern="head_norm.weight", style="heads"),
            ShardRule(pattern="out_proj.weight", style="rows"),
        )

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        return (
            InitRule(pattern="A_log.weight", kind="log_uniform", low=0.01, high=16.0),
            InitRule(pattern="dt_bias.weight", kind="ones"),
            InitRule(pattern="head_norm.weight", kind="ones"),
        )

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        return ("out_proj.weight",)

    @property
    def hugging_face(self) -> Mapping[str, str | HuggingFaceForm]:
        there = "linear_attn"
        total = 2 * self._key_width + self._value_width

        def rows(first: int) -> HuggingFaceForm:
            return HuggingFaceForm(key=f"{there}.conv1d.weight", rows=(first, total))

        return {
            "in_proj_qkvz.weight": f"{there}.in_proj_qkvz.weight",
            "in_proj_ba.weight": f"{there}.in_proj_ba.weight",
            "q_conv.weight": rows(0),
            "k_conv.weight": rows(self._key_width),
            "v_conv.weight": rows(2 * self._key_width),
            "A_log.weight": f"{there}.A_log",
            "dt_bias.weight": f"{there}.dt_bias",
            "head_norm.weight": f"{there}.norm.weight",
            "out_proj.weight": f"{there}.out_proj.weight",
        }

    def num_matrix_elements(self, dim: int) -> int:
        projected = 2 * self._key_width + 2 * self._value_width + 2 * self.num_value_heads
        return dim * (projected + self._value_width)

    def num_other_params(self) -> int:
        convolution = self.kernel_size * (2 * self._key_width + self._value_width)
        return convolution + 2 * self.num_value_heads + self.value_head_dim

    def flops_per_token(self, seq_len: int) -> int:
        # Of the recurrence: one product to look up, one to write, one to read; forward once and
        # backward twice. Chunks take more.
        return 3 * 3 * 2 * self.num_value_heads * self.key_head_dim * self.value_head_dim

    def build(self, dim: int, backend: Backend) -> "GatedDeltaNet":
        return GatedDeltaNet(dim, self)

    @property
    def _key_width(self) -> int:
        return self.num_heads * self.key_head_dim

    @property
    def _value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


class GatedDeltaNet(Recurrence):
    """[B, S, D] -> [B, S, D]. Names and rows of the projections are those of transformers."""

    # The serial part of a chunk.
    saved_ops = frozenset({torch.ops.aten.linalg_solve_triangular.default})

    def __init__(self, dim: int, dims: GatedDelta) -> None:
        super().__init__()
        self.dims = dims
        keys = dims.num_heads * dims.key_head_dim
        values = dims.num_value_heads * dims.value_head_dim
        # Rows by key head: its query, its key, the values and the output gates of its value heads.
        self.in_proj_qkvz = nn.Linear(dim, 2 * keys + 2 * values, bias=False)
        # The same: writing strengths, then decays.
        self.in_proj_ba = nn.Linear(dim, 2 * dims.num_value_heads, bias=False)
        self.q_conv = HeadWeights(keys, 1, dims.kernel_size)
        self.k_conv = HeadWeights(keys, 1, dims.kernel_size)
        self.v_conv = HeadWeights(values, 1, dims.kernel_size)
        self.A_log = HeadWeights(dims.num_value_heads)
        self.dt_bias = HeadWeights(dims.num_value_heads)
        self.head_norm = nn.RMSNorm(dims.value_head_dim, eps=dims.norm_eps)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        dims, carry = self.dims, self.carry
        shared = dims.num_value_heads // dims.num_heads
        key, value = dims.key_head_dim, dims.value_head_dim
        rows_BSKR = self.in_proj_qkvz(x_BSD).unflatten(-1, (-1, 2 * key + 2 * shared * value))
        *parts, gate = rows_BSKR.split([key, key, shared * value, shared * value], dim=-1)
        # Selected and not split, because softplus's gradient has other strides than the compiler
        # expects, and that of a split keeps them (torch 2.13: "view size is not compatible").
        gates = self.in_proj_ba(x_BSD).unflatten(-1, (-1, 2, shared))
        strength_BSH, step_BSH = (gates[..., part, :].flatten(-2) for part in range(2))
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        rate_H = self.A_log().to(wide).exp()
        decay_BSH = -rate_H * F.softplus(step_BSH.to(wide) + self.dt_bias().to(wide))
        strength_BSH = strength_BSH.to(wide).sigmoid()
        padding_BS = carry.is_padding(x_BSD.shape[1])
        if padding_BS is not None:
            decay_BSH = decay_BSH.masked_fill(padding_BS[..., None], 0.0)
            strength_BSH = strength_BSH.masked_fill(padding_BS[..., None], 0.0)

        num_before = dims.kernel_size - 1
        documents_ZL = (
            None
            if context.documents_BS is None
            else carry.documents(context.documents_BS, num_before)
        )
        widths = [part.shape[-2] * part.shape[-1] for part in parts]
        inputs_BSI = torch.cat([part.flatten(-2) for part in parts], dim=-1)
        extended_ZLI = carry.extend(self._pieces(inputs_BSI), num_before)
        taps_I1T = torch.cat([self.q_conv(), self.k_conv(), self.v_conv()])
        mixed_ZLI = short_convolution(extended_ZLI, taps_I1T, documents_ZL)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(1, 2).to(wide)
            for part, width in zip(mixed_ZLI.split(widths, dim=-1), (key, key, value), strict=True)
        )
        q_ZHLE = (_normalized(q) * key**-0.5).repeat_interleave(shared, dim=1)
        k_ZHLE = _normalized(k).repeat_interleave(shared, dim=1)
        decay_ZHL, strength_ZHL = (
            self._pieces(part).transpose(1, 2) for part in (decay_BSH, strength_BSH)
        )
        out_ZHLG = gated_delta_rule(
            q_ZHLE,
            k_ZHLE,
            v,
            decay_ZHL,
            strength_ZHL,
            None if documents_ZL is None else documents_ZL[:, num_before - 1 :],
            carry=carry,
            chunk_size=dims.chunk_size,
        )
        out_BSHG = out_ZHLG.transpose(1, 2).unflatten(0, (-1, carry.num_pieces)).flatten(1, 2)
        out_BSHG = self.head_norm(out_BSHG.to(x_BSD.dtype)).flatten(-2)
        return self.out_proj(out_BSHG * F.silu(gate.flatten(-2)))

    def _pieces(self, x_BSI: torch.Tensor) -> torch.Tensor:
        """[B, S, I] -> [Z, L, I]."""
        return x_BSI.unflatten(1, (self.carry.num_pieces, -1)).flatten(0, 1)

    def input_shape(self) -> tuple[int, int]:
        channels = sum(
            local_tensor(part.weight).shape[0] for part in (self.q_conv, self.k_conv, self.v_conv)
        )
        return self.dims.kernel_size - 1, channels

    def state_shape(self) -> tuple[int, int, int]:
        heads = local_tensor(self.A_log.weight).shape[0]
        return heads, self.dims.key_head_dim, self.dims.value_head_dim


def short_convolution(
    inputs_ZLI: torch.Tensor, taps_I1T: torch.Tensor, documents_ZL: torch.Tensor | None
) -> torch.Tensor:
    """Return the silu of a causal convolution of each channel, [Z, L, I]. The first T - 1 inputs,
    of L + T - 1, are of earlier positions. A position reads inputs of its own document only."""
    num_taps = taps_I1T.shape[-1]
    length = inputs_ZLI.shape[1] - num_taps + 1
    wide = torch.promote_types(inputs_ZLI.dtype, torch.float32)
    total_ZLI = torch.zeros((), dtype=wide, device=inputs_ZLI.device)
    for tap in range(num_taps):
        there = slice(tap, tap + length)
        part_ZLI = inputs_ZLI[:, there].to(wide) * taps_I1T[:, 0, tap].to(wide)
        if documents_ZL is not None:
            is_other_ZL = documents_ZL[:, there] != documents_ZL[:, num_taps - 1 :]
            part_ZLI = part_ZLI.masked_fill(is_other_ZL[..., None], 0.0)
        total_ZLI = total_ZLI + part_ZLI
    return F.silu(total_ZLI).to(inputs_ZLI.dtype)


def gated_delta_rule(
    q_ZHLE: torch.Tensor,
    k_ZHLE: torch.Tensor,
    v_ZHLG: torch.Tensor,
    decay_ZHL: torch.Tensor,
    strength_ZHL: torch.Tensor,
    documents_ZL: torch.Tensor | None,
    *,
    carry: Carry,
    chunk_size: int,
) -> torch.Tensor:
    """Return the outputs [Z, H, L, G]. `decay_ZHL` are logarithms, at most 0. `documents_ZL` are
    those of the position before each piece, and of its own."""
    if q_ZHLE.shape[2] == 1 and not carry.needs_map and documents_ZL is None:
        return _one_position(q_ZHLE, k_ZHLE, v_ZHLG, decay_ZHL, strength_ZHL, carry)
    length = q_ZHLE.shape[2]
    size = min(chunk_size, length)
    missing = -length % size
    # Padding forgets and writes nothing.
    q, k, v = (
        F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (q_ZHLE, k_ZHLE, v_ZHLG)
    )
    decay_ZHNC, strength_ZHNC = (
        F.pad(x, (0, missing)).unflatten(2, (-1, size)) for x in (decay_ZHL, strength_ZHL)
    )
    total_ZHNC = decay_ZHNC.cumsum(-1)
    is_future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    is_apart, is_after = is_future, None
    if documents_ZL is not None:
        before_ZN1, inside_ZNC = _documents_of_chunks(documents_ZL, size, missing)
        is_apart = is_future | (inside_ZNC[..., None] != inside_ZNC[..., None, :])[:, None]
        is_after = (inside_ZNC != before_ZN1)[:, None]
    # Of each position back to each earlier one, to the start of the chunk, and from it to the end.
    # Sums, because differences of totals would lose small decays behind a large one.
    since_ZHNCC = torch.where(is_future.mT, decay_ZHNC[..., None], 0.0).cumsum(-2)
    between_ZHNCC = since_ZHNCC.masked_fill(is_apart, -torch.inf).exp()
    if is_after is not None:
        total_ZHNC = total_ZHNC.masked_fill(is_after, -torch.inf)
    start_ZHNC = total_ZHNC.exp()
    whole_ZHN11 = start_ZHNC[..., -1:, None]
    ending = k * between_ZHNCC[..., -1, :, None]

    system = strength_ZHNC[..., None] * between_ZHNCC * (k @ k.mT)
    sides = torch.cat([v, k * start_ZHNC[..., None]], dim=-1) * strength_ZHNC[..., None]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    # What positions write is `writes - reads @ state`.
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    state = None if carry.needs_map else carry.begin(None)
    if state is None:
        state = v.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    written = writes
    if carry.needs_map:
        # The matrix of the map is the state that the identity becomes, without writing values.
        unit = torch.eye(k.shape[-1], dtype=v.dtype, device=v.device)
        state = torch.cat([state, unit.expand(*state.shape[:2], -1, -1)], dim=-1)
        written = F.pad(writes, (0, k.shape[-1]))
    states = []
    for chunk in range(q.shape[2]):
        states.append(state)
        new = written[:, :, chunk] - reads[:, :, chunk] @ state
        state = whole_ZHN11[:, :, chunk] * state + ending[:, :, chunk].mT @ new
    states_ZHNEG = torch.stack(states, dim=2)
    if carry.needs_map:
        parts = [v.shape[-1], k.shape[-1]]
        offset, matrix = state.split(parts, dim=-1)
        first_ZHEG = carry.begin(AffineMap(matrix, offset))
        offsets, matrices = states_ZHNEG.split(parts, dim=-1)
        assert first_ZHEG is not None
        states_ZHNEG = offsets + matrices @ first_ZHEG[:, :, None]
    else:
        carry.end(state)
    new = writes - reads @ states_ZHNEG
    out = (q * start_ZHNC[..., None]) @ states_ZHNEG + (between_ZHNCC * (q @ k.mT)) @ new
    return out.flatten(2, 3)[:, :, :length]


def _documents_of_chunks(
    documents_ZL: torch.Tensor, size: int, missing: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of the position before each chunk [Z, N, 1], and of those of it
    [Z, N, C]. Padding belongs to the last document."""
    last_Z1 = documents_ZL[:, -1:]
    padded = torch.cat([documents_ZL, last_Z1.expand(-1, missing)], dim=1)
    return padded[:, :-1:size, None], padded[:, 1:].unflatten(1, (-1, size))


def _one_position(
    q_ZHLE: torch.Tensor,
    k_ZHLE: torch.Tensor,
    v_ZHLG: torch.Tensor,
    decay_ZHL: torch.Tensor,
    strength_ZHL: torch.Tensor,
    carry: Carry,
) -> torch.Tensor:
    """Return the output [Z, H, 1, G] of a single position, by the recurrence itself."""
    state_ZHEG = carry.begin(None)
    if state_ZHEG is None:
        state_ZHEG = k_ZHLE.mT @ torch.zeros_like(v_ZHLG)
    state_ZHEG = state_ZHEG * decay_ZHL.exp()[..., None]
    new_ZHLG = (v_ZHLG - k_ZHLE @ state_ZHEG) * strength_ZHL[..., None]
    state_ZHEG = state_ZHEG + k_ZHLE.mT @ new_ZHLG
    carry.end(state_ZHEG)
    return q_ZHLE @ state_ZHEG


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide by the length of the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
