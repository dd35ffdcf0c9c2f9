"""Facts of a transformers config.json, which are read into dimensions and written back: an
architecture is a list of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

from torchtitan_lite.nn.feed_forward import Activation
from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig
from torchtitan_lite.nn.hugging_face.names import USUAL_NAMES, HuggingFaceNames
from torchtitan_lite.nn.spec import HuggingFaceKey


class Fact(Protocol):
    """One or more keys of a config.json. Dimensions of experts are named `moe.NAME`."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        """Add to `dims`, which have the facts before this one, what `config` says."""
        ...

    def write(self, dims: Any) -> dict[str, Any]:
        """Return the keys for `dims`."""
        ...


_POSITIONS = ("max_seq_len", "window")
"""Dimensions that count positions, with which modules do not grow."""


@dataclass(frozen=True)
class Value:
    """A number or a flag."""

    ours: str
    theirs: str
    kind: Literal["integer", "number", "flag"] = "integer"
    default: Any = None
    """Value if the key is absent, or a function of the dimensions before; None: it is needed."""
    former: str | None = None
    """Name of the key in other releases."""
    null: Callable[[Mapping[str, Any]], int] | None = None
    """Value if the key is null, from the dimensions before. Unset: `default`."""
    least: int = 1
    """Smallest integer."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        default: Any = self.default(dims) if callable(self.default) else self.default
        key = self.theirs
        former = None if self.former is None else config.given(self.former)
        if self.former is not None and former is not None and config.given(key) is None:
            key = self.former
        if self.null is not None and config.has(key) and config.given(key) is None:
            default = self.null(dims)
        if self.ours == "num_layers":
            dims[self.ours] = config.num_layers(key, default)
        elif self.kind == "integer":
            read = config.integer if self.ours in _POSITIONS else config.size
            dims[self.ours] = read(key, default, least=self.least)
        elif self.kind == "number":
            dims[self.ours] = config.number(key, default)
        else:
            dims[self.ours] = config.flag(key, default=default)

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: attrgetter(self.ours)(dims)}


class Ignored:
    """Keys without effect in an architecture, which releases have."""

    def __init__(self, *theirs: str) -> None:
        self._theirs = theirs

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        config.ignore(*self._theirs)

    def write(self, dims: Any) -> dict[str, Any]:
        return {}


class Fixed:
    """A key of which only some values are supported; the first of them is written, and is that of a
    config without the key."""

    def __init__(self, theirs: str, *allowed: Any, is_written: bool = True) -> None:
        self._theirs, self._allowed, self._is_written = theirs, allowed, is_written

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        config.only(self._theirs, *self._allowed)

    def write(self, dims: Any) -> dict[str, Any]:
        return {self._theirs: self._allowed[0]} if self._is_written else {}


@dataclass(frozen=True)
class Given:
    """A dimension that all models of an architecture have, and its config.json does not tell."""

    ours: str
    value: Any
    """Or a function of the dimensions before."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        dims[self.ours] = self.value(dims) if callable(self.value) else self.value

    def write(self, dims: Any) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Biases:
    """Biases of several kinds of projections together, by default all of attention."""

    theirs: str = "attention_bias"
    default: bool = False
    ours: tuple[str, ...] = ("bias", "out_bias")

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        dims |= dict.fromkeys(self.ours, config.flag(self.theirs, default=self.default))

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: getattr(dims, self.ours[0])}


class OneBias:
    """Biases of all projections together, with a key for attention and one for the feed-forward
    block, which must agree. Some releases have other names of both."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        names = (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
        attention, block = (
            config.flag(name, default=config.flag(former, default=False)) for name, former in names
        )
        if attention != block:
            config.problems.append(
                f"attention_bias is {attention} and mlp_bias {block}, and they must be equal"
            )
        dims |= dict.fromkeys(("bias", "out_bias", "feed_forward_bias"), attention)

    def write(self, dims: Any) -> dict[str, Any]:
        return {"attention_bias": dims.bias, "mlp_bias": dims.feed_forward_bias}


_ACTIVATION_NAMES: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "relu_squared": ("relu2",),
}
"""Names in transformers, of which the first is written."""


@dataclass(frozen=True)
class ActivationOf:
    """The activation of the feed-forward block."""

    theirs: str = "hidden_act"
    default: str = "silu"

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        name = config.given(self.theirs, self.default)
        activations = [ours for ours, theirs in _ACTIVATION_NAMES.items() if name in theirs]
        if not activations:
            known = ", ".join(
                spelling for theirs in _ACTIVATION_NAMES.values() for spelling in theirs
            )
            config.problems.append(f"{self.theirs} is {name!r:.100}, and one of {known} is needed")
        dims["activation"] = activations[0] if activations else "silu"

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: _ACTIVATION_NAMES[dims.activation][0]}


@dataclass(frozen=True)
class Switch:
    """A flag there that is one of two values of a dimension here."""

    ours: str
    theirs: str
    on: Any
    off: Any
    default: bool

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        is_on = config.flag(self.theirs, default=self.default)
        dims[self.ours] = self.on if is_on else self.off

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: getattr(dims, self.ours) == self.on}


class AttentionMultiplier:
    """The factor of the scores; null or absent: 1 / sqrt(head_dim)."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        value = config.given("attention_multiplier")
        usual = (dims["head_dim"] or width_per_head(dims)) ** -0.5
        factor = usual if value is None else config.checked_number("attention_multiplier", value)
        dims["attention_multiplier"] = None if factor == usual else factor

    def write(self, dims: Any) -> dict[str, Any]:
        return {"attention_multiplier": dims.attention_multiplier}


@dataclass(frozen=True)
class OptionalNumber:
    """A bound of scores, logits or projections; null: none."""

    ours: str
    theirs: str
    default: float | None

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        value = config.given(self.theirs, self.default)
        dims[self.ours] = None if value is None else config.checked_number(self.theirs, value)

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: getattr(dims, self.ours)}


@dataclass(frozen=True)
class ScoreScale:
    """A number by whose root the scores are divided."""

    theirs: str
    default: int

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        dims["attention_multiplier"] = config.integer(self.theirs, self.default) ** -0.5

    def write(self, dims: Any) -> dict[str, Any]:
        scale = dims.attention_multiplier or dims.head_size**-0.5
        return {self.theirs: round(scale**-2)}


@dataclass(frozen=True)
class HeadWidth:
    """The width of a head, unset where it is that of dim / num_heads."""

    default: int | None = None
    """Width if the key is absent. Unset, and if it is null: dim / num_heads."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        usual = width_per_head(dims)
        is_null = config.has("head_dim") and config.given("head_dim") is None
        width = config.size("head_dim", usual if is_null else self.default or usual)
        dims["head_dim"] = None if width == usual else width

    def write(self, dims: Any) -> dict[str, Any]:
        return {"head_dim": dims.head_size}


@dataclass(frozen=True)
class PadToken:
    """The token whose embedding transformers does not train as an input. A negative one counts from
    the end, as in `nn.Embedding`; one without an embedding is no input."""

    default: int | None = None

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        token_id, vocab_size = config.given("pad_token_id"), dims["vocab_size"]
        if not config.has("pad_token_id"):
            token_id = self.default
        if token_id is not None and type(token_id) is not int:
            config.report_not_whole("pad_token_id", token_id)
        is_input = type(token_id) is int and -vocab_size <= token_id < vocab_size
        dims["pad_token_id"] = token_id % vocab_size if is_input else None

    def write(self, dims: Any) -> dict[str, Any]:
        is_usual = dims.pad_token_id is None and self.default is None
        return {} if is_usual else {"pad_token_id": dims.pad_token_id}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How transformers stores the models of one `model_type`."""

    name: str
    """Entry of `architectures`."""
    model_type: str
    facts: tuple[Fact, ...]
    """In the order in which they are read: one may need what those before it have read (`Rotation`
    the rotated share, `LayerThetas` and `RopeInWindows` the windows, `SharedExperts` the width of
    an expert, `RotatedWidth` and `AttentionMultiplier` the width of a head)."""
    experts: tuple[HuggingFaceKey, ...] = ()
    """Names of the parameters of experts. Empty: its layers are dense."""
    names: HuggingFaceNames = USUAL_NAMES
    quantization: str | None = None
    """Kind of quantized weights that are read."""

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dimensions of a config.json by their names, those of experts in a dict `moe`.
        Raises ConfigError with everything unsupported."""
        config = HuggingFaceConfig(values)
        if self.quantization is not None:
            config.accept_quantization(self.quantization)
        facts = read_facts(self.facts, config)
        config.check()
        dims = {name: value for name, value in facts.items() if "." not in name}
        if self.experts:
            start = "moe."
            dims["moe"] = {
                name.removeprefix(start): value
                for name, value in facts.items()
                if name.startswith(start)
            }
        return dims

    def write(self, dims: Any) -> dict[str, Any]:
        """Return the config.json of `dims`."""
        head = {"architectures": [self.name], "model_type": self.model_type}
        return head | write_facts(self.facts, dims)


def read_facts(facts: Iterable[Fact], config: HuggingFaceConfig) -> dict[str, Any]:
    """Read dimensions by name. What is unsupported is recorded in `config`."""
    dims: dict[str, Any] = {}
    for fact in facts:
        fact.read(config, dims)
    return dims


def write_facts(facts: Iterable[Fact], dims: Any) -> dict[str, Any]:
    """Return the keys of a config.json for `dims`."""
    return {key: value for fact in facts for key, value in fact.write(dims).items()}


def decoder_facts(
    *,
    activation: str | None = "silu",
    attention_bias: bool | None = False,
    mlp_bias: bool | None = False,
    norm_key: str | None = "rms_norm_eps",
    norm_eps: float = 1e-6,
    num_kv_heads: int | None = None,
    num_kv_heads_key: str | None = "num_key_value_heads",
    tied_embeddings: bool = False,
    pad_token_id: int | None = None,
    has_padding: bool = True,
) -> Sequence[Fact]:
    """Return the facts that all decoders have. `activation` (transformers' name),
    `attention_bias` and `mlp_bias` are the only supported ones, None if the architecture has facts
    of its own about these. The others are those of a config without them; by default, there are as
    many `num_kv_heads` as query heads. `norm_key` is None if all have this `norm_eps`, as is
    `num_kv_heads_key`. `has_padding`: the embedding of the padding token is not
    trained as an input, because that of transformers has a `padding_idx`."""

    def default_kv_heads(dims: Mapping[str, Any]) -> int:
        return num_kv_heads or dims["num_heads"]

    return (
        Value("dim", "hidden_size"),
        Value("num_layers", "num_hidden_layers"),
        Value("num_heads", "num_attention_heads"),
        Value("vocab_size", "vocab_size"),
        Given("num_kv_heads", default_kv_heads)
        if num_kv_heads_key is None
        else Value("num_kv_heads", num_kv_heads_key, default=default_kv_heads, null=_num_heads),
        Given("norm_eps", norm_eps)
        if norm_key is None
        else Value("norm_eps", norm_key, "number", norm_eps),
        Value("max_seq_len", "max_position_embeddings"),
        Value("tied_embeddings", "tie_word_embeddings", "flag", default=tied_embeddings),
        *((PadToken(pad_token_id),) if has_padding else ()),
        *(() if activation is None else (Fixed("hidden_act", activation),)),
        *(() if attention_bias is None else (Fixed("attention_bias", attention_bias),)),
        *(() if mlp_bias is None else (Fixed("mlp_bias", mlp_bias, is_written=False),)),
        _AttentionDropout(),
    )


def _num_heads(dims: Mapping[str, Any]) -> int:
    return dims["num_heads"]


class _AttentionDropout:
    """Written as none. A run configures its own dropout, so what a config.json says is not read."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        pass

    def write(self, dims: Any) -> dict[str, Any]:
        return {"attention_dropout": 0.0}


def width_per_head(dims: Mapping[str, Any]) -> int:
    """Return the default width of a head."""
    # At least 1 if a size is wrong, which is recorded.
    return max(1, dims["dim"] // dims["num_heads"])
