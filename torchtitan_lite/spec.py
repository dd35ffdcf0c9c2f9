"""What layers hand to each other: plain frozen data and protocols.

A model family hands over a `ModelSpec`; the data loader hands over `Microbatch`es; a schedule
runs them. Because these are data, `parallel/` never names a model and a model never imports
`parallel/`. Layer: above errors, log and rng only.

Shape legend, used as suffixes of tensor names everywhere:
    B samples   S positions   T = B*S tokens   D model width   H query heads   K key/value heads
    E width of a head   F width of the feed-forward   V vocabulary
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
from torch import nn

IGNORE = -100
"""A target that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The samples that one rank runs through the model at once, and what forward needs of them."""

    tokens_BS: torch.Tensor
    """int64."""
    targets_BS: torch.Tensor
    """int64; `IGNORE` where the position has no target."""
    positions_BS: torch.Tensor
    """int64 position of each token in its block."""
    documents_BS: torch.Tensor | None
    """int32 number of the document within the block, rising from 0; None without document masks."""
    keys_B: torch.Tensor
    """int64 key of each sample for random draws in forward; a function of seed, step and sample."""
    samples: tuple[int, ...]
    """The samples' indices in the global order."""

    def to(self, device: torch.device) -> "Microbatch":
        """A copy on `device`; from pinned memory the copy does not make the host wait."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return Microbatch(
            tokens_BS=move(self.tokens_BS),
            targets_BS=move(self.targets_BS),
            positions_BS=move(self.positions_BS),
            documents_BS=None if self.documents_BS is None else move(self.documents_BS),
            keys_B=move(self.keys_B),
            samples=self.samples,
        )


class VocabularyShard(Protocol):
    """The rows of the vocabulary that this rank holds, and sums over the ranks that hold the
    others."""

    first: int
    """The first row of this rank."""

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        """The greatest of all ranks' `values`, element by element, in place."""
        ...

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `values`, element by element, in place."""
        ...


class TokenLoss(Protocol):
    """The loss as a sum over target tokens, fused with the output projection so that the logits
    of a large vocabulary are never held whole."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        shard: VocabularyShard | None = None,
    ) -> torch.Tensor:
        """A 0-d tensor, float32 or wider. With `shard`, `weight_VD` holds only this rank's rows;
        the loss is that of the whole vocabulary, and the gradient of `hidden_TD` only this rank's
        part of it."""
        ...


class Schedule(Protocol):
    """Runs the microbatches of a step through the stages of the model that this rank holds.

    Gradient accumulation is a pipeline with one stage, so the loop has one path.
    """

    min_microbatches: int
    """`run` wants at least as many."""

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """This rank's share of the loss of `microbatches`: a detached 0-d tensor, whose sum over
        all ranks is the loss summed over target tokens. With `backward`, the gradients of that
        sum, reduced over the mesh, are in `.grad`. `before_last` is called before the one backward
        that makes every gradient final, where there is such a one."""
        ...


@dataclass(frozen=True, kw_only=True)
class InitRule:
    """How the parameters whose name matches `pattern` (fnmatch) are drawn. The first match wins."""

    pattern: str
    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    cutoff_stds: float = 3.0
    """A normal draw is truncated at this many standard deviations."""


@dataclass(frozen=True, kw_only=True)
class ShardRule:
    """How tensor parallelism shards the parameters whose name matches `pattern` (fnmatch). The
    first match wins; a parameter without one is replicated."""

    pattern: str
    style: Literal["columns", "rows", "embedding", "output", "sequence", "heads"]
    """columns: a linear's output features. rows: its input features. embedding, output: the
    vocabulary. sequence: the weight is replicated and its module works on a shard of the
    sequence. heads: the weight is replicated and its module works on this rank's heads (dim 2)."""


@dataclass(frozen=True, kw_only=True)
class TorchtitanKey:
    """What torchtitan calls a parameter or buffer, and how it lays it out."""

    name: str
    """Here, with `*` for the number of a layer."""
    theirs: tuple[str, ...]
    """There: of torchtitan 0.2, then of 0.3 where that differs; with `*` in the same place."""
    rope_heads: int = 0
    """The rows are those of so many heads, whose halves here are interleaved there."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceForm:
    """One way in which a Hugging Face folder may hold a parameter."""

    key: str
    """There, with `*` for the number of a layer. A second `*` counts along dim 0: each element is a
    tensor of its own."""
    part: tuple[int, int] = (0, 1)
    """Number k of n equal parts of the dim before the last, where several are fused into one."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceKey:
    """Where a parameter or buffer lies in a Hugging Face folder, in the same order of rows."""

    name: str
    """Here, with `*` for the number of a layer."""
    forms: tuple[HuggingFaceForm, ...]
    """The first is what is written. Empty: it does not exist there, and is zero."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What Hugging Face's transformers call a model."""

    config: Mapping[str, Any]
    """Its config.json."""
    keys: tuple[HuggingFaceKey, ...]
    """Of all parameters and persistent buffers."""
    ignored: tuple[str, ...]
    """Patterns (fnmatch) of keys that may be there and say nothing."""
    differences: Callable[[Mapping[str, Any]], list[str]]
    """What a config.json says otherwise than the dimensions of this model. Raises ConfigError
    where it is of a model that is none of this family."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a model costs, for logs and MFU."""

    num_params: int
    num_active_params: int
    """Parameters that one token passes through; less than all of them in a mixture of experts."""
    flops_per_token: int
    """Forward and backward of one token at the sequence length asked for, attention included."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that the framework needs to know of one flavor of a model family."""

    name: str
    flavor: str
    dims: Any
    """The family's frozen dataclass of dimensions."""
    vocab_size: int
    num_layers: int
    max_seq_len: int
    document_mask: bool
    """Whether attention stays within documents, and a document's first token is no target."""
    build: Callable[[], nn.Module]
    """Makes the module; called under the meta device."""
    init: tuple[InitRule, ...]
    shard_plan: tuple[ShardRule, ...] = ()
    """How tensor parallelism cuts the model."""
    sharded_sizes: tuple[tuple[str, int], ...] = ()
    """(what it is, how many): sizes that the degree of tensor parallelism must divide."""
    num_heads: int = 0
    """Query heads of each attention; context parallelism by Ulysses shares them out."""
    num_experts: int = 0
    """Experts of each mixture, which expert parallelism shares out. 0: there are none."""
    expert_width: int = 0
    """Features within one expert, which expert tensor parallelism cuts."""
    expert_capacity_factor: float | None = None
    """Set where experts drop what exceeds this multiple of their fair share of a sequence."""
    stage_units: tuple[str, ...] = ()
    """Names of the modules that the pipeline shares out, in the order of forward; none of them is
    missed by the model's forward when it is None or deleted. Empty: no pipeline."""
    tied_units: tuple[str, str] | None = None
    """Two modules whose `weight` is one parameter, in the order of forward."""
    width: int = 0
    """Width of the hidden states that pass from stage to stage."""
    blocks: str = "layers.*"
    """Pattern of the repeated blocks: the unit of sharding, checkpointing and compiling."""
    extra_fsdp_units: tuple[str, ...] = ()
    """Modules beside the blocks that are gathered on their own; the rest goes with the root."""
    torchtitan_keys: tuple[TorchtitanKey, ...] = ()
    """The names of all parameters and persistent buffers in torchtitan's checkpoints. Empty: they
    are not converted."""
    hugging_face: HuggingFaceModel | None = None
    """None: there are no such folders of this family."""
    no_decay: tuple[str, ...] = field(default=("*norm*", "*embeddings*", "*.bias"))
    """Parameters that weight decay leaves alone."""
    cost: Callable[[int], ModelCost]
    """Sequence length -> cost."""


_NOT_OF_THE_FUNCTION = {
    *("attention_backend", "document_mask", "dropout", "max_seq_len"),
    *("balance_loss_weight", "bias_update_rate"),
}
"""Dimensions of a flavor that say how a model is trained or computed: another value is a choice of
the run, and the weights fit as before."""


def differing_dims(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the dimensions in which two recorded models differ, with both values. One that is
    absent from a record, written before the dimension existed, is not compared."""
    found = []
    for name in sorted((there.keys() & here.keys()) - _NOT_OF_THE_FUNCTION):
        one, other = there[name], here[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{name}.{text}" for text in differing_dims(one, other)]
        elif one != other:
            shown = ["unset" if value is None else value for value in (one, other)]
            found.append(f"{name} is {shown[0]} there and {shown[1]} here")
    return found


def modules_matching(model: nn.Module, *patterns: str) -> list[nn.Module]:
    """Return the modules whose name matches a pattern at the pattern's own depth, in model
    order."""
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, p) and name.count(".") == p.count(".") for p in patterns)
    ]


def blocks_of(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """Return the repeated blocks, in model order."""
    return modules_matching(model, spec.blocks)
