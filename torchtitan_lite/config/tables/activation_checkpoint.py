"""The [activation_checkpoint] table."""

from typing import Annotated, Literal

from pydantic import field_validator

from torchtitan_lite.config.tables.section import NoEffect, Section, between, only

_NO_BUDGET = 'mode = "memory_budget" is not supported by this version'


class ActivationCheckpointConfig(Section):
    """Which activations are saved for backward, and which are recomputed."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """"none" saves all; "full" saves the input of each block; "selective" see
    `selective_ac_option`. "memory_budget" is not supported by this version."""
    selective_ac_option: str = "2"
    """A number n: every n-th block of a pipeline stage is recomputed in full. "op": every block
    saves its attention outputs and every second matrix product, and recomputes the rest, including
    the dispatch of tokens to experts."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = ["router.gate"]
    """Linear modules, by parts of their names, whose matrix products are always recomputed under
    "op" (torchtitan: `["moe.router.gate"]`)."""
    early_stop: bool = False
    """Stop recomputing once backward has what it needs."""
    memory_budget: Annotated[float, between(0, 1), NoEffect(_NO_BUDGET)] = 0.5
    """Accepted and without effect: mode "memory_budget" is not supported by this version."""
    visualize_memory_budget_pareto: Annotated[bool, only(False, "the memory budget's picture")] = (
        False
    )
    """Plot memory against time of the memory budgets."""
    preserve_rng_state: bool = True
    """Restore the global generators before recomputing. The models here use keyed draws and need it
    only for custom code."""
    determinism_check: Literal["default", "none"] = "default"
    """How a recomputation is compared with the first: by shapes and dtypes, or not."""
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
