"""The [quantize] tables."""

from typing import Annotated, Any, Literal

from torchtitan_lite.config.tables.section import NoEffect, Section

_GATHERED = "FSDP gathers weights in the precision of the forward pass"


class Float8Config(Section):
    """Linear layers in float8, by torchao. Enabled by "quantize.linear.float8" in
    `model.converters`."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Scaling: by tensor, by row, or by row with the weights' gradient in bfloat16. Unset: by
    tensor."""
    filter_fqns: list[str] = []
    """Linear modules to exclude, by parts of their names. Routers are always excluded."""
    emulate: bool = False
    """Emulate float8 in float32: slow, on any device, for tests."""
    enable_fsdp_float8_all_gather: Annotated[bool, NoEffect(_GATHERED)] = False
    """Accepted and without effect: FSDP gathers weights in the precision of the forward pass and
    casts them afterwards, for two to four times the bytes."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[bool, NoEffect(_GATHERED)] = False
    """Accepted and without effect, as `enable_fsdp_float8_all_gather`."""


class QuantizedLinearConfig(Section):
    """Number formats of linear layers."""

    float8: Float8Config = Float8Config()
    mx: dict[str, Any] = {}
    """MX formats. Accepted and without effect, because no converter reads it."""


class QuantizeConfig(Section):
    """Low precision, enabled by `model.converters`."""

    linear: QuantizedLinearConfig = QuantizedLinearConfig()
    grouped_mm: dict[str, Any] = {}
    """Experts' matrices. Accepted and without effect, because no converter reads it."""
