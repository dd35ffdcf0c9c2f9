"""Actions after a step that was not committed: skip it, roll back, or end the run."""

from torchtitan_lite.checkpoint import CheckpointManager, SavedValues
from torchtitan_lite.core.errors import DamagedState, MachineFault, TrainingDiverged
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.fault_tolerance.replica import Replicas, Share
from torchtitan_lite.training.anomalies import Decision, StepAction
from torchtitan_lite.training.step.totals import StepTotals
from torchtitan_lite.training.train_state import TrainState

Outcome = tuple[list[StepEvent], TrainingDiverged | MachineFault | None]
"""Events, and why the run or this replica ends, if it does."""


def handle_anomaly(
    decision: Decision,
    totals: StepTotals,
    state: TrainState,
    checkpoints: CheckpointManager,
    replicas: Replicas,
    share: Share,
    *,
    samples: range,
    roll_back_steps: int,
) -> Outcome:
    """Skip an anomalous step, and roll back or end the run if decided. `samples` are those of the
    step, before `state.cursor`; `roll_back_steps` is the least age of the state that a rollback
    restores. All ranks of all replicas must call it."""
    state.statistics.record_skip()
    loss, grad_norm = totals.mean_loss, totals.grad_norm
    problem = (
        f"Step {state.step + 1} {decision.reason}: loss {loss:g}, gradient norm {grad_norm:g}, "
        f"samples {samples.start} to {samples.stop - 1}."
    )
    warn_on_rank_0("%s Action: %s.", problem, decision.action.value)
    values = {"action": decision.action.value, "reason": decision.reason, "loss": loss}
    values |= {"grad_norm": grad_norm, "samples": [samples.start, samples.stop]}
    events = [StepEvent("refused", values)]
    if decision.action is StepAction.ROLL_BACK:
        events += [_roll_back(state, checkpoints, replicas, share, min_steps=roll_back_steps)]
    if decision.action is not StepAction.STOP:
        return events, None
    return events, TrainingDiverged(
        f"{problem} Lower optimizer.lr, or inspect these samples (debug.sample_ledger = true "
        "records which rank used them)."
    )


def report_faulty_ranks(decision: Decision, step: int, share: Share, world_size: int) -> Outcome:
    """Report the ranks whose recomputation of `step` differed, or whose state changed before it.
    Their replicas end."""
    places = [divmod(index, world_size) for index in decision.faulty_ranks]
    names = ", ".join(f"rank {rank} of participant {index}" for index, rank in places)
    participants, ranks = [index for index, _ in places], [rank for _, rank in places]
    if decision.has_damaged_state:
        event, problem = (
            "state_changed",
            f"The state changed in memory before step {step} on {names}",
        )
    else:
        event, problem = "replay_differs", f"The recomputation of step {step} differs on {names}"
    logger.error("%s.", problem)
    events = [StepEvent(event, {"participants": participants, "ranks": ranks})]
    if share.index not in participants:
        return events, None
    if decision.has_damaged_state:
        return events, DamagedState(
            f"{problem}: memory of that machine is faulty. Restart without it, from the newest "
            "checkpoint."
        )
    return events, MachineFault(
        f"Step {step} was anomalous, and its recomputation differs on {names}: memory or processor "
        "of that machine are faulty. Restart without it."
    )


def _roll_back(
    state: TrainState,
    checkpoints: CheckpointManager,
    replicas: Replicas,
    share: Share,
    *,
    min_steps: int,
) -> StepEvent:
    """Restore the newest state at least `min_steps` steps old; `state.cursor` stays at the next
    sample. Without such a state nothing changes.

    With several replicas the first one restores, and the others heal from it in the next quorum:
    each has other snapshots, and the data cursor, by which replicas compare their progress, would
    not distinguish two steps.
    """
    if share.index != 0:
        checkpoints.discard_snapshots()
        replicas.after_rollback(is_source=False)
        warn_on_rank_0("The state of an earlier step will be received from the first replica.")
        return StepEvent("rolled_back", {"received": True})
    before, statistics = state.step, state.statistics

    def accepts(saved: SavedValues) -> bool:
        cursor = saved.values.get("dataloader", {}).get("cursor", 0)
        return not (saved.model_only or statistics.was_abandoned(saved.step, cursor))

    where = checkpoints.restore_earlier(before - min_steps, accepts)
    replicas.after_rollback(is_source=True)
    if where is None:
        warn_on_rank_0("No rollback: no saved state is at least %d steps old.", min_steps)
        return StepEvent("rolled_back", {"to": before, "from": None})
    state.statistics, restored = statistics, state.statistics
    statistics.record_rollback(restored, at=before, to=state.step, cursor=state.cursor)
    warn_on_rank_0(
        "Rolled back from step %d to step %d, from %s; training continues with sample %d.",
        before,
        state.step,
        where,
        state.cursor,
    )
    return StepEvent("rolled_back", {"to": state.step, "from": where, "sample": state.cursor})
