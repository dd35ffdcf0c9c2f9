"""The [debug] table."""

from typing import Annotated

from torchtitan_lite.schema.section import Section, at_least, only


class DebugConfig(Section):
    """Reproducibility, and aids for finding faults."""

    seed: int | None = None
    """Seed of the initial weights, the order of the samples and the random draws in forward.
    Unset means 0."""
    deterministic: bool = False
    """Use deterministic algorithms only; may be slower."""
    deterministic_warn_only: bool = False
    """With `deterministic`: warn about an operation that has no deterministic algorithm instead of
    stopping."""
    moe_force_load_balance: Annotated[bool, only(False, "forced balance of experts")] = False
    """Send every expert the same number of tokens."""
    sample_ledger: bool = False
    """Write the ids of the samples that each rank used in each committed step, as JSON lines."""
    explicit_redistribution: bool = False
    """Stop with an error that names operation and module where forward or backward redistributes
    a DTensor without being told to. Not with `compile.enable`."""
    trace_communication: bool = False
    """Write the collectives of one step and the peak memory of each module below
    `job.dump_folder`: `communication_rank_N.json` by every rank, and `communication.txt`. Not with
    `compile.enable`."""
    trace_communication_step: Annotated[int, at_least(1)] | None = None
    """Number of the step to trace. Unset: the second that this run takes, since the first allocates
    and connects, or the only one."""
    max_skipped_steps: Annotated[int, at_least(1)] = 10
    """Stop when this many steps in a row were refused for their numbers, whatever `[anomalies]`
    says of a single one."""
