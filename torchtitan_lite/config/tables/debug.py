"""The [debug] table."""

from typing import Annotated

from torchtitan_lite.config.tables.section import Section, at_least, only


class DebugConfig(Section):
    """Reproducibility and debugging."""

    seed: int | None = None
    """Seed of the initial weights, the sample order and random draws in forward. Unset means 0."""
    deterministic: bool = False
    """Use deterministic algorithms only; can be slower."""
    deterministic_warn_only: bool = False
    """With `deterministic`: warn about an operation without a deterministic algorithm instead of
    raising."""
    moe_force_load_balance: Annotated[bool, only(False, "forced balance of experts")] = False
    """Send every expert the same number of tokens."""
    sample_ledger: bool = False
    """Write the ids of the samples of each rank and step as JSON lines, before the step is
    committed. `torchtitan-lite report RUN --check-samples` checks that each was used once."""
    explicit_redistribution: bool = False
    """Raise an error naming operation and module if forward or backward redistributes a DTensor
    implicitly. Not with `compile.enable`."""
    trace_communication: bool = False
    """Write the collectives of one step and the peak memory of each module below
    `job.dump_folder`: `communication_rank_N.json` by every rank, and `communication.txt`. Not with
    `compile.enable`."""
    trace_communication_step: Annotated[int, at_least(1)] | None = None
    """Step to trace. Unset: the second one of this run, because the first allocates and connects,
    or the only one."""
    max_skipped_steps: Annotated[int, at_least(1)] = 10
    """End the run after this many consecutive skipped steps, whatever `[anomalies]` says about a
    single one."""
