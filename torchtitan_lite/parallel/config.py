"""The sections of techniques that change how the model runs. Layer: imports section only."""

from typing import Annotated, Any, Literal

from pydantic import field_validator

from torchtitan_lite.section import Section, between, only


class PrecisionConfig(Section):
    """Data types, as keys of [training]."""

    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Data type of parameters, gradients and optimizer state. float64 is for comparisons."""
    mixed_precision_param: Literal["bfloat16", "float32", "auto"] = "auto"
    """Data type in which parameters take part in forward and backward. "auto": bfloat16 on a GPU,
    `training.dtype` elsewhere (torchtitan: bfloat16 everywhere)."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Data type in which gradients are summed over ranks, where theirs is narrower."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and take the optimizer's
    step there."""


class ActivationCheckpointConfig(Section):
    """Which activations are kept for backward, and which are computed again."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """"none" keeps all; "full" keeps the input of each block; "selective" see
    `selective_ac_option`. "memory_budget" is not supported by this version."""
    selective_ac_option: str = "2"
    """A number n: every n-th block is computed again in full. "op": every block keeps its
    attention outputs and every other matrix product, and computes the rest again, with it the
    exchange of tokens between experts."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = ["router.gate"]
    """Linear modules, by parts of their names, whose matrix products are always computed again
    under "op" (torchtitan: `["moe.router.gate"]`)."""
    early_stop: bool = False
    """Stop computing again once all that backward needs is there."""
    memory_budget: Annotated[float, between(0, 1)] = 0.5
    """Without effect: "memory_budget" is not supported by this version."""
    visualize_memory_budget_pareto: Annotated[bool, only(False, "the memory budget's picture")] = (
        False
    )
    """Draw memory against time of the memory budgets."""
    preserve_rng_state: bool = True
    """Restore the ambient generators before computing again. The models here draw from keys and
    need it only for code of your own."""
    determinism_check: Literal["default", "none"] = "default"
    """How a second computation is compared with the first: by shapes and dtypes, or not."""
    debug: bool = False
    """Record where activations are computed, for error messages; slower."""

    @field_validator("mode")
    @classmethod
    def _supported(cls, mode: str) -> str:
        if mode == "memory_budget":
            raise ValueError(
                'memory_budget is not supported by this version; use "none", "selective" or "full"'
            )
        return mode

    @field_validator("selective_ac_option")
    @classmethod
    def _number_or_op(cls, option: str) -> str:
        if option != "op" and not (option.isdigit() and int(option) > 0):
            raise ValueError(f'must be "op" or a positive number in quotes, got "{option}"')
        return option


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
    enable_fsdp_float8_all_gather: Annotated[bool, only(False, "gathering weights in float8")] = (
        False
    )
    """Let FSDP gather weights in float8."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, only(False, "scales for weights gathered in float8")
    ] = False
    """Find the scales of all gathered weights at once."""


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


class CompileConfig(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile the repeated blocks of the model."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What is compiled: "model" the blocks, "loss" the output projection with its loss."""
    backend: str = "inductor"
    """Backend of torch.compile."""
