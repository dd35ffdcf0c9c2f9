"""Decoders of grouped-query attention with a dense feed-forward block or experts in every layer:
the dimensions that all of them have. A family is a subclass with its own defaults and facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.decoder_family import decoder_model_spec, output_of
from torchtitan_lite.nn.decoder_spec import decoder_torchtitan_keys
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face.config import differences, export_problem, named_architecture
from torchtitan_lite.nn.hugging_face.facts import Architecture
from torchtitan_lite.nn.hugging_face.names import decoder_hugging_face_keys, ignored_keys
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.norm import RMS_NORM, NormKind
from torchtitan_lite.nn.rope import Rope, Scaling
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec


@dataclass(frozen=True, kw_only=True)
class GroupedDecoderDims:
    """The dimensions of one flavor. Its layers have either a feed-forward of width `hidden_dim` or
    the experts of `moe`."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int | None = None
    """Width of the feed-forward block."""
    moe: MoEDims | None = None
    vocab_size: int = 32000
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    head_dim: int | None = None
    """Unset: dim / num_heads."""
    bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the output projections of attention have biases."""
    feed_forward_bias: bool = False
    """Whether the projections of dense blocks have biases."""
    window: int | None = None
    """Positions that a windowed layer attends to. Unset: all."""
    windowed_layers: tuple[int, ...] | None = None
    """Layers with a window. Unset: all layers, if there is a window."""
    norm: NormKind = RMS_NORM
    """Of hidden states."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    max_seq_len: int = 32768
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_blocks()
        if self.head_dim is None and self.dim % self.num_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must divide dim ({self.dim}), or set head_dim."
            )
        # Raises ConfigError for sizes that do not fit.
        _ = self.layers

    def check_blocks(self) -> None:
        """Raise ConfigError if there is not one kind of feed-forward block."""
        if (self.hidden_dim is None) == (self.moe is None):
            raise ConfigError(
                f"Give either hidden_dim ({self.hidden_dim}), for dense blocks, or moe "
                f"({self.moe}), for experts."
            )

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        return [self.layer(layer) for layer in range(self.num_layers)]

    def layer(self, layer: int) -> DecoderLayer:
        """Return the parts of a layer."""
        feed_forward = self.moe
        if feed_forward is None:
            assert self.hidden_dim is not None
            feed_forward = self.dense(self.hidden_dim)
        return DecoderLayer(attention=self.attention(layer), feed_forward=feed_forward)

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer has a window."""
        everywhere = self.windowed_layers is None
        return self.window is not None and (everywhere or layer in (self.windowed_layers or ()))

    @property
    def is_in_torchtitan(self) -> bool:
        """Whether torchtitan has such a model, if it has the family."""
        return not (self.bias or self.out_bias or self.feed_forward_bias or self.window)

    def dense(self, hidden_dim: int) -> Dense:
        """Return the feed-forward of dense layers."""
        return Dense(hidden_dim=hidden_dim, bias=self.feed_forward_bias)

    def stored_as(self) -> str | None:
        """Return the `model_type` under which transformers has the model; None: any of the
        family's that has such dimensions."""
        return None

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer."""
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            bias=self.bias,
            out_bias=self.out_bias,
            window=self.window if self.is_windowed(layer) else None,
            rotation=Rope(
                head_dim=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling
            ),
        )


_Dims = TypeVar("_Dims", bound=GroupedDecoderDims)


@dataclass(frozen=True, kw_only=True)
class GroupedDecoderFamily(Generic[_Dims]):
    """A family of these decoders: its dimensions, and how transformers and torchtitan store it."""

    name: str
    dims: type[_Dims]
    architectures: tuple[Architecture, ...]
    is_in_torchtitan: bool = True
    torchtitan_rotates_pairs: bool = False
    """Whether torchtitan rotates adjacent numbers of a head, as Meta's release does
    (docs/adr/0003)."""

    @property
    def model_types(self) -> dict[str, str]:
        """The architectures in transformers that `dims_of_hugging_face` supports, with their model
        types."""
        return {architecture.name: architecture.model_type for architecture in self.architectures}

    def spec_of(self, dims: _Dims, flavor: str) -> ModelSpec:
        """Return the spec of any dimensions. It has no names in transformers if none of the
        architectures has a model of these dimensions."""
        keys = dims.attention(0).torchtitan_keys(pairs=self.torchtitan_rotates_pairs)
        return decoder_model_spec(
            dims,
            name=self.name,
            flavor=flavor,
            norm=dims.norm,
            torchtitan_keys=(
                decoder_torchtitan_keys(dims.layers, keys)
                if self.is_in_torchtitan and dims.is_in_torchtitan
                else ()
            ),
            hugging_face=self._hugging_face(dims),
        )

    def dims_of_hugging_face(self, values: Mapping[str, Any]) -> _Dims:
        """Read the dimensions from a config.json. Raises ConfigError with everything
        unsupported."""
        name = named_architecture(values, self.model_types)
        rows = {architecture.name: architecture for architecture in self.architectures}
        dims = rows[name].read(values)
        if "moe" in dims:
            dims["moe"] = MoEDims(**dims["moe"])
        return self.dims(**dims)

    def _hugging_face(self, dims: _Dims) -> HuggingFaceModel | str | None:
        problems = []
        for architecture in self.architectures:
            is_other = dims.stored_as() not in (None, architecture.model_type)
            if is_other or bool(architecture.experts) != (dims.moe is not None):
                continue
            values = architecture.write(dims)
            problem = export_problem(values, dims, self.dims_of_hugging_face)
            if problem is None:
                return HuggingFaceModel(
                    config=values,
                    keys=decoder_hugging_face_keys(
                        dims.layers,
                        tied_embeddings=dims.tied_embeddings,
                        experts=architecture.experts,
                        norm=dims.norm,
                        output_bias=output_of(dims).bias,
                        names=architecture.names,
                    ),
                    ignored=(
                        *ignored_keys(tied_embeddings=dims.tied_embeddings),
                        *architecture.names.unused_keys(dims.num_layers),
                    ),
                    differences=lambda config: differences(dims, self.dims_of_hugging_face(config)),
                )
            problems.append(problem)
        return "; ".join(problems) or None
