"""The data and protocols between layers.

A model family provides a `ModelSpec`, the data loader `Microbatch`es, and a schedule runs them.
Because these are data, `parallel/` never names a model and a model never imports `parallel/`.

Shape legend, used as suffixes of tensor names everywhere: B samples S positions T = B*S tokens D
model width H query heads K key/value heads E width of a head F width of the feed-forward V
vocabulary J depths of multi-token prediction
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
from torch import nn

IGNORE_INDEX = -100
"""Target without a loss."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The samples of one forward on one rank."""

    tokens_BS: torch.Tensor
    """int64."""
    targets_BS: torch.Tensor
    """int64; `IGNORE_INDEX` where the position has no target."""
    positions_BS: torch.Tensor
    """int64 position of each token in its block."""
    documents_BS: torch.Tensor | None
    """int32 index of the document within the block, ascending from 0; None without document masks.
    """
    rng_keys_B: torch.Tensor
    """int64 key of each sample for random draws in forward; a function of seed, step and sample."""
    samples: tuple[int, ...]
    """Indices of the samples in the global order."""
    future_tokens_BJS: torch.Tensor | None = None
    """int64; the token 1, 2, ... J positions ahead, for multi-token prediction. See `with_future`.
    """
    future_targets_BJS: torch.Tensor | None = None
    """int64; the target of that position."""
    target_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float64 [B, S] by name: numbers of each target from an online data set, for a registered
    loss."""

    def with_future(self, depth: int) -> "Microbatch":
        """Return a copy with what `depth` modules of multi-token prediction need
        (arXiv:2412.19437, section 2.2), from entire sequences. A position has no target where a
        document ends in between."""
        if not depth:
            return self
        shifted = [self._shifted(distance) for distance in range(1, depth + 1)]
        tokens, targets = (torch.stack(part, dim=1) for part in zip(*shifted, strict=True))
        return replace(self, future_tokens_BJS=tokens, future_targets_BJS=targets)

    def _shifted(self, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_BS = self.tokens_BS.roll(-distance, dims=1)
        targets_BS = self.targets_BS.roll(-distance, dims=1)
        targets_BS[:, -distance:] = IGNORE_INDEX
        if self.documents_BS is not None:
            is_other_BS = self.documents_BS.roll(-distance, dims=1) != self.documents_BS
            targets_BS = targets_BS.masked_fill(is_other_BS, IGNORE_INDEX)
        return tokens_BS, targets_BS

    @property
    def future_inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of forward for multi-token prediction; empty without it."""
        if self.future_tokens_BJS is None or self.future_targets_BJS is None:
            return {}
        return {
            "future_tokens_BJS": self.future_tokens_BJS,
            "future_targets_BJS": self.future_targets_BJS,
        }

    def to(self, device: torch.device) -> "Microbatch":
        """Return a copy on `device`; from pinned memory without waiting."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        values = {name: move(value) for name, value in self.target_values.items()}
        moved = {name: move(value) for name, value in tensors.items()}
        return replace(self, **moved, target_values=values)


class VocabularyShard(Protocol):
    """This rank's rows of the vocabulary, and reductions over the ranks that hold the others."""

    first: int
    """This rank's first row."""

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        """Max-reduce `values` over all ranks, element-wise and in place."""
        ...

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum-reduce `values` over all ranks, element-wise and in place."""
        ...


class TokenLoss(Protocol):
    """The loss summed over target tokens, fused with the output projection so that the logits of a
    large vocabulary are never materialized."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        shard: VocabularyShard | None = None,
    ) -> torch.Tensor:
        """Return the 0-d loss, at least float32. With `shard`, `weight_VD` holds only this rank's
        rows; the loss is over the entire vocabulary, and the gradient of `hidden_TD` is this rank's
        partial sum. Models with a soft cap of logits pass `soft_cap`, the bound to which tanh maps
        them, which the cross entropy alone takes."""
        ...


MicrobatchLoss = Callable[[Microbatch], TokenLoss]
"""Returns the loss of a microbatch on this rank's device. Under context parallelism it holds this
rank's positions, as the loss does."""


class PipelineSchedule(Protocol):
    """Runs the microbatches of a step through this rank's stages.

    Gradient accumulation is a pipeline with one stage, so there is one loop.
    """

    min_microbatches: int
    """Minimum microbatches of `run`."""

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of the loss of `microbatches`: a detached 0-d tensor, whose sum
        over all ranks is the loss summed over target tokens. With `backward`, the gradients of that
        sum, reduced over the mesh, are in `.grad`. `before_last` is called before the single
        backward that makes every gradient final, if there is one."""
        ...


@dataclass(frozen=True, kw_only=True)
class InitRule:
    """How the parameters whose name matches `pattern` (fnmatch) are initialized. The first match
    wins."""

    pattern: str
    kind: Literal["normal", "log_uniform", "fan_in_uniform", "ones", "zeros"]
    """log_uniform: the logarithm of a uniform draw. fan_in_uniform: uniform in +-1 / sqrt(columns),
    as `nn.Linear` draws its weight."""
    std: float = 0.0
    cutoff_stds: float = 3.0
    """Truncation of a normal draw, in standard deviations."""
    low: float = 0.0
    """Bounds of a uniform draw."""
    high: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ShardRule:
    """How tensor parallelism shards the parameters whose name matches `pattern` (fnmatch). The
    first match wins; a parameter without one is replicated."""

    pattern: str
    style: Literal[
        "columns",
        "local_columns",
        "rows",
        "embedding",
        "output",
        "sequence",
        "heads",
        "all_heads",
        "head_weights",
    ]
    """columns: a linear's output features; the input of the module that holds it is gathered along
    the sequence, once for all of them. local_columns: the same, but an `nn.attention.AcrossHeads`
    before the linear gathers. rows: its input features. embedding, output: the vocabulary.
    sequence: the weight is replicated and its module works on a shard of the sequence. heads: the
    weight is replicated and its module works on this rank's heads (dim 2). all_heads: a weight per
    feature of all heads, sharded as these, of an `nn.norm.AllHeadsNorm`. head_weights: a weight
    per head, sharded as the heads; its module returns those of this rank."""


@dataclass(frozen=True, kw_only=True)
class TorchtitanKey:
    """Name and layout of a parameter or buffer in torchtitan."""

    name: str
    """Here, with `*` for the number of a layer."""
    theirs: tuple[str, ...]
    """Names in torchtitan 0.2, then in 0.3 if different; with `*` in the same place."""
    rope_heads: int = 0
    """Heads whose halves here are interleaved there; 0: same rows."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceForm:
    """A form of a parameter in a Hugging Face folder."""

    key: str
    """Its key, with `*` for the layer number. A second `*` counts along dim 0: each element is a
    tensor of its own."""
    part: tuple[int, int] = (0, 1)
    """(k, n): part k of n equal parts of the second-last dim (the last one there, if `transposed`),
    if several parameters are fused."""
    transposed: bool = False
    """Whether the last two dims are swapped there."""
    rows: tuple[int, int] | None = None
    """Set, (first, total): rows from `first` of a tensor of `total` rows, if several parameters are
    fused along dim 0."""
    is_row: bool = False
    """Whether it is the only row of a matrix there."""
    scales: str | None = None
    """Set: the key holds MXFP4 blocks of 32 numbers, and this one their scales; read as bfloat16,
    and never written."""

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is a tensor of its own, with the same dims."""
        is_part = self.part != (0, 1) or self.rows is not None
        return not (is_part or self.transposed or self.is_row)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceKey:
    """The forms of a parameter or buffer in a Hugging Face folder, in the same order of rows."""

    name: str
    """Here, with `*` for the number of a layer."""
    forms: tuple[HuggingFaceForm, ...]
    """The first is written. Empty: absent there, and zero here."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """The config and names of a model in Hugging Face's transformers."""

    config: Mapping[str, Any]
    """Its config.json."""
    keys: tuple[HuggingFaceKey, ...]
    """Of all parameters and persistent buffers."""
    ignored: tuple[str, ...]
    """Patterns (fnmatch) of keys to ignore."""
    always_written: tuple[str, ...] = ()
    """Keys of `config` that an export takes from there, and not from the config.json that the model
    was imported with."""
    differences: Callable[[Mapping[str, Any]], list[str]]
    """Return how a config.json differs from these dimensions. Raises ConfigError if it is of
    another family."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The cost of a model, for logs and MFU."""

    num_params: int
    num_active_params: int
    """Parameters per token; fewer than all with experts."""
    flops_per_token: int
    """FLOPs of forward and backward per token at the given sequence length, attention included."""


RotateMethod = Literal["allgather", "alltoall", "ulysses"]
"""How context parallelism exchanges what attention needs of other ranks' positions."""


@dataclass(frozen=True, kw_only=True)
class AttentionSharding:
    """What parallelism may do with one kind of attention of a model."""

    name: str = "attention"
    """What error messages call it."""
    num_heads: int
    """Query heads, which Ulysses shards."""
    state_width: int = 0
    """Numbers per position that context parallelism gathers, for estimates."""
    rotations: tuple[RotateMethod, ...] = ("allgather", "alltoall", "ulysses")
    """Exchanges of context parallelism that it supports."""
    carried_inputs: int = 0
    """Set for a recurrence: the inputs of a convolution that a rank hands on beside the state,
    whatever the method."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that the framework knows of one flavor of a model family."""

    name: str
    flavor: str
    dims: Any
    """The family's frozen dataclass of dimensions."""
    vocab_size: int
    num_layers: int
    """Blocks, including those of multi-token prediction."""
    max_seq_len: int
    document_mask: bool
    """Whether attention is masked by document, and a document's first token is not a target."""
    build: Callable[[], nn.Module]
    """Builds the module, under the meta device."""
    init: tuple[InitRule, ...]
    shard_plan: tuple[ShardRule, ...] = ()
    """Rules of tensor parallelism."""
    sharded_sizes: tuple[tuple[str, int], ...] = ()
    """(description, size): sizes that the degree of tensor parallelism must divide."""
    attentions: tuple[AttentionSharding, ...] = ()
    """The kinds of attention in the model."""
    logits_soft_cap: float | None = None
    """Bound of the logits, to which tanh maps them; the loss must compute it."""
    num_experts: int = 0
    """Experts per MoE block. 0: none."""
    expert_width: int = 0
    """Features of one expert, which expert tensor parallelism shards."""
    expert_capacity_factor: float | None = None
    """The experts' capacity factor, if they drop tokens."""
    stage_units: tuple[str, ...] = ()
    """Modules that the pipeline partitions, in the order of forward; forward must skip those that
    are None or deleted. Empty: no pipeline parallelism."""
    tied_units: tuple[str, str] | None = None
    """Two modules whose `weight` is one parameter, in the order of forward."""
    prediction_units: tuple[str, ...] = ()
    """Modules of multi-token prediction, among the `stage_units`: only training runs them, forward
    takes `Microbatch.future_inputs` for them, and the last stage of a pipeline must hold them."""
    copied_units: tuple[str, ...] = ()
    """Units of other stages whose `weight` the prediction units need."""
    width: int = 0
    """Width of the hidden states between stages."""
    blocks: str = "layers.*"
    """Pattern of the repeated blocks: the unit of sharding, checkpointing and compiling. A block is
    called as `block(x_BSD, context: BlockContext)` and returns hidden states of the same shape,
    which under sequence parallelism are a shard of the sequence. Those in `prediction_units` also
    take `embedded_BSD`, and do not add to `x_BSD`."""
    extra_fsdp_units: tuple[str, ...] = ()
    """Modules beside the blocks that FSDP wraps on their own; the rest is in the root."""
    torchtitan_keys: tuple[TorchtitanKey, ...] = ()
    """Names of all parameters and persistent buffers in torchtitan's checkpoints. Empty: not
    convertible."""
    hugging_face: HuggingFaceModel | None = None
    """None: transformers has no such model."""
    hugging_face_problem: str | None = None
    """Why `hugging_face` is None, if the family has other models in transformers."""
    no_decay: tuple[str, ...] = field(default=("*norm*", "*embeddings*", "*bias", "*sinks*"))
    """Parameters without weight decay."""
    no_muon: tuple[str, ...] = field(
        default=("*embed*", "output.*", "*.router.*", "*.shared_gate.*", "*bias*", "*_conv.*")
    )
    """Parameters that the optimizer Muon leaves to AdamW although they have two dims, or three (a
    stack of matrices along dim 0), beside the embedding and the output of the shard plan."""
    cost: Callable[[int], ModelCost]
    """Maps a sequence length to the cost."""

    @property
    def unknown_to_transformers(self) -> str:
        """The beginning of an error: transformers has no such model, and the reason if known."""
        reason = "" if self.hugging_face_problem is None else f" ({self.hugging_face_problem})"
        return f"{self.name} {self.flavor} is unknown to transformers{reason}"

    @property
    def muon_exclusions(self) -> tuple[str, ...]:
        """Patterns of the parameters of two or three dims that Muon leaves to AdamW."""
        rules = (rule for rule in self.shard_plan if rule.style in ("embedding", "output"))
        return (*self.no_muon, *(rule.pattern for rule in rules))


RUN_SETTINGS = {
    *("attention_backend", "document_mask", "dropout", "max_seq_len"),
    *("balance_loss_weight", "z_loss_weight", "bias_update_rate", "mtp_loss_weight"),
    *("chunk_size", "pad_token_id"),
}
"""Dimensions of a flavor that do not change the function of its weights: settings of the run."""


def differing_dims(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the dimensions in which two recorded models differ, with both values. One that is
    absent from a record, written before the dimension existed, is not compared."""
    differences = []
    for name in sorted((there.keys() & here.keys()) - RUN_SETTINGS):
        theirs, ours = there[name], here[name]
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            differences += [f"{name}.{text}" for text in differing_dims(theirs, ours)]
        elif theirs != ours:
            shown = ["unset" if value is None else value for value in (theirs, ours)]
            differences.append(f"{name} is {shown[0]} there and {shown[1]} here")
    return differences


def linear_parameters(has_bias: bool) -> tuple[str, ...]:
    """Return the names of the parameters of a linear layer."""
    return ("weight", "bias") if has_bias else ("weight",)


def modules_matching(model: nn.Module, *patterns: str) -> list[nn.Module]:
    """Return the modules whose name matches a pattern at the pattern's own depth, in model
    order."""
    return [
        module
        for name, module in model.named_modules()
        if any(_matches(name, pattern) for pattern in patterns)
    ]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def named_blocks(model: nn.Module, spec: ModelSpec) -> list[tuple[int, str, nn.Module]]:
    """Return (layer, name, block) for the repeated blocks of `model`, in model order. A pipeline
    stage has only some blocks; `layer` counts those of the entire model, from 0."""
    held = [(name, module) for name, module in model.named_modules() if _matches(name, spec.blocks)]
    # A spec without stage units has no pipeline parallelism: all blocks are here.
    entire = [unit for unit in spec.stage_units if _matches(unit, spec.blocks)]
    layers = {name: layer for layer, name in enumerate(entire or (name for name, _ in held))}
    return [(layers[name], name, block) for name, block in held]


def blocks_of(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """Return the repeated blocks of `model`, which may be a pipeline stage, in model order. See
    `named_blocks` for their numbers in the entire model."""
    return modules_matching(model, spec.blocks)
