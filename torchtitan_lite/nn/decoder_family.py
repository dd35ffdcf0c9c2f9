"""What all families of `nn.decoder.Decoder` share: the module and the spec, from dimensions with
the same names."""

from collections.abc import Sequence
from typing import Protocol

from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import PLAIN_OUTPUT, Decoder, DecoderLayer, OutputDims
from torchtitan_lite.nn.decoder_spec import (
    decoder_cost,
    decoder_init,
    decoder_shard_plan,
    decoder_stage_units,
)
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.norm import RMS_NORM, NormKind
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec, TorchtitanKey


class DecoderDims(Protocol):
    """Dimensions of all families."""

    @property
    def dim(self) -> int: ...
    @property
    def layers(self) -> Sequence[DecoderLayer]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def attention_backend(self) -> Backend: ...
    @property
    def document_mask(self) -> bool: ...
    @property
    def dropout(self) -> float: ...


def build_decoder(
    dims: DecoderDims,
    *,
    prediction_layers: Sequence[DecoderLayer] = (),
    prediction_loss_weight: float = 0.0,
    norm: NormKind = RMS_NORM,
) -> Decoder:
    """Build the module, with parameters as the current default device creates them. The arguments
    are those of `Decoder`."""
    return Decoder(
        dim=dims.dim,
        vocab_size=dims.vocab_size,
        # A family of a user's may not have all.
        pad_token_id=getattr(dims, "pad_token_id", None),
        norm_eps=dims.norm_eps,
        layers=dims.layers,
        attention_backend=dims.attention_backend,
        tied_embeddings=dims.tied_embeddings,
        dropout=dims.dropout,
        prediction_layers=prediction_layers,
        prediction_loss_weight=prediction_loss_weight,
        norm=norm,
        multipliers=getattr(dims, "multipliers", None),
        output=output_of(dims),
    )


def output_of(dims: DecoderDims) -> OutputDims:
    """Return what the output projection of a family has."""
    return getattr(dims, "output", PLAIN_OUTPUT)


def decoder_model_spec(
    dims: DecoderDims,
    *,
    name: str,
    flavor: str,
    prediction_layers: Sequence[DecoderLayer] = (),
    prediction_loss_weight: float = 0.0,
    norm: NormKind = RMS_NORM,
    torchtitan_keys: tuple[TorchtitanKey, ...] = (),
    hugging_face: HuggingFaceModel | str | None = None,
) -> ModelSpec:
    """Return the spec of the module that `build_decoder` builds. `hugging_face` is its form in
    transformers, or why it has none."""
    layers = (*dims.layers, *prediction_layers)
    first_prediction = len(layers) - len(prediction_layers)
    # Blocks with experts are alike in all families.
    moe = next(
        (layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoEDims)), None
    )
    kinds = dict.fromkeys(layers)
    return ModelSpec(
        name=name,
        flavor=flavor,
        dims=dims,
        vocab_size=dims.vocab_size,
        num_layers=len(layers),
        max_seq_len=dims.max_seq_len,
        document_mask=dims.document_mask,
        build=lambda: build_decoder(
            dims,
            prediction_layers=prediction_layers,
            prediction_loss_weight=prediction_loss_weight,
            norm=norm,
        ),
        init=decoder_init(
            dim=dims.dim,
            layers=layers,
            tied_embeddings=dims.tied_embeddings,
            norm=norm,
            output_bias=output_of(dims).bias,
        ),
        shard_plan=decoder_shard_plan(
            layers,
            has_predictions=bool(prediction_layers),
            norm=norm,
            output_bias=output_of(dims).bias,
        ),
        logits_soft_cap=output_of(dims).soft_cap,
        attentions=tuple(dict.fromkeys(layer.attention.sharding for layer in kinds)),
        num_experts=0 if moe is None else moe.num_experts,
        expert_width=0 if moe is None else moe.hidden_dim,
        expert_capacity_factor=None if moe is None else moe.capacity_factor,
        stage_units=decoder_stage_units(len(layers)),
        tied_units=("tok_embeddings", "output") if dims.tied_embeddings else None,
        prediction_units=tuple(
            f"layers.{number}" for number in range(first_prediction, len(layers))
        ),
        copied_units=("tok_embeddings",) if prediction_layers else (),
        width=dims.dim,
        sharded_sizes=tuple(
            dict.fromkeys(
                size
                for layer in kinds
                for part in (layer.attention, layer.feed_forward)
                for size in part.sharded_sizes
            )
        ),
        # Tied weights are one parameter of two modules, which only their parent can gather once.
        extra_fsdp_units=() if dims.tied_embeddings else ("tok_embeddings", "output"),
        torchtitan_keys=torchtitan_keys,
        hugging_face=hugging_face if isinstance(hugging_face, HuggingFaceModel) else None,
        hugging_face_problem=hugging_face if isinstance(hugging_face, str) else None,
        cost=lambda seq_len: decoder_cost(
            dim=dims.dim,
            layers=layers,
            num_predictions=len(prediction_layers),
            vocab_size=dims.vocab_size,
            tied_embeddings=dims.tied_embeddings,
            seq_len=seq_len,
            norm=norm,
            output_bias=output_of(dims).bias,
        ),
    )
