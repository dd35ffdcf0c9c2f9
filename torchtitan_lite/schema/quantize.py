"""The [quantize] tables."""

from typing import Annotated, Any, Literal

from torchtitan_lite.schema.section import NoEffect, Section

_GATHERED = "FSDP gathers weights in the precision of the forward pass"


class Float8Config(Section):
    """Linear layers in float8, by torchao. In force when `model.converters` names
    "quantize.linear.float8"."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How numbers are scaled: by tensor, by row, or by row with the gradient of the weights in
    bfloat16. Unset: by tensor."""
    filter_fqns: list[str] = []
    """Linear modules whose name contains one of these are left as they are. Routers always are."""
    emulate: bool = False
    """Compute in float32 what float8 would give: slow, on any device, for tests."""
    enable_fsdp_float8_all_gather: Annotated[bool, NoEffect(_GATHERED)] = False
    """Accepted and without effect: FSDP gathers weights in the precision of the forward pass and
    casts them afterwards, for two to four times the bytes."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[bool, NoEffect(_GATHERED)] = False
    """Accepted and without effect, as `enable_fsdp_float8_all_gather`."""


class QuantizedLinearConfig(Section):
    """Number formats of linear layers."""

    float8: Float8Config = Float8Config()
    mx: dict[str, Any] = {}
    """MX formats. Accepted and without effect, since no converter reads it."""


class QuantizeConfig(Section):
    """Low precision, by the converters that `model.converters` names."""

    linear: QuantizedLinearConfig = QuantizedLinearConfig()
    grouped_mm: dict[str, Any] = {}
    """Experts' matrices. Accepted and without effect, since no converter reads it."""
