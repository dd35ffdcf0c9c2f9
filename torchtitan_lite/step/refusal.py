"""Reactions to anomalous steps. Layer: above roll_back."""

from collections.abc import Sequence

from torchtitan_lite.anomalies import Action, Verdict
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import MachineFault, TrainingDiverged
from torchtitan_lite.log import logger
from torchtitan_lite.replica import ReplicaEvent, Replicas, Share
from torchtitan_lite.step.roll_back import roll_back
from torchtitan_lite.train_state import TrainState

Outcome = tuple[list[ReplicaEvent], TrainingDiverged | MachineFault | None]
"""Events, and why the run or this replica ends, if it does."""


def refuse(
    verdict: Verdict,
    state: TrainState,
    checkpoints: CheckpointManager,
    replicas: Replicas,
    share: Share,
    *,
    loss: float,
    grad_norm: float,
    samples: range,
    roll_back_steps: int,
) -> Outcome:
    """Apply `verdict`. `samples` are those of the step, before `state.cursor`. All ranks of all
    replicas must call it."""
    state.history.refused()
    told = (
        f"Step {state.step + 1} {verdict.reason}: loss {loss:g}, gradient norm {grad_norm:g}, "
        f"samples {samples.start} to {samples.stop - 1}."
    )
    logger.warning("%s It is refused: %s.", told, verdict.action.value)
    values = {"action": verdict.action.value, "reason": verdict.reason, "loss": loss}
    values |= {"grad_norm": grad_norm, "samples": [samples.start, samples.stop]}
    news = [ReplicaEvent("refused", values)]
    if verdict.action is Action.ROLL_BACK:
        news += [roll_back(state, checkpoints, replicas, share, least_steps=roll_back_steps)]
    if verdict.action is not Action.STOP:
        return news, None
    advice = "Lower optimizer.lr, or look at these samples (debug.sample_ledger = true tells which "
    return news, TrainingDiverged(f"{told} {advice}rank used them).")


def blame(differing: Sequence[int], step: int, share: Share, world_size: int) -> Outcome:
    """Report ranks whose recomputation of `step` differed, by their index among all ranks; a
    replica that has one ends."""
    places = [divmod(place, world_size) for place in differing]
    told = ", ".join(f"rank {rank} of participant {index}" for index, rank in places)
    logger.error("Step %d computed again came out otherwise on %s.", step, told)
    participants, ranks = [index for index, _ in places], [rank for _, rank in places]
    news = [ReplicaEvent("replay_differs", {"participants": participants, "ranks": ranks})]
    if share.index not in participants:
        return news, None
    return news, MachineFault(
        f"Step {step} was suspicious, and computed again it came out otherwise on {told}: memory "
        "or processor there are at fault. Start again without that machine."
    )
