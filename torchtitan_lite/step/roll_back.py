"""Roll back to an earlier step after an anomaly.

With several replicas the first one restores, and the others heal from it in the next quorum: each
has other snapshots, and the data cursor, by which replicas compare their progress, would not
distinguish two steps. Layer: above train_state, replica and checkpoint.
"""

from torchtitan_lite.checkpoint import CheckpointManager, SavedValues
from torchtitan_lite.log import logger
from torchtitan_lite.replica import ReplicaEvent, Replicas, Share
from torchtitan_lite.train_state import TrainState


def roll_back(
    state: TrainState,
    checkpoints: CheckpointManager,
    replicas: Replicas,
    share: Share,
    *,
    least_steps: int,
) -> ReplicaEvent:
    """Restore the newest state at least `least_steps` steps old; `state.cursor` stays at the next
    sample. Without such a state nothing changes. All ranks of all replicas must call it."""
    if share.index != 0:
        checkpoints.discard_snapshots()
        replicas.rolled_back(has_state=False)
        return ReplicaEvent("rolled_back", {"received": True})
    left, history = state.step, state.history

    def accepts(saved: SavedValues) -> bool:
        cursor = saved.values.get("dataloader", {}).get("cursor", 0)
        return not (saved.model_only or history.has_left_behind(saved.step, cursor))

    where = checkpoints.restore_earlier(left - least_steps, accepts)
    replicas.rolled_back(has_state=True)
    if where is None:
        logger.warning("No state is %d steps old: nothing is rolled back.", least_steps)
        return ReplicaEvent("rolled_back", {"to": left, "from": None})
    state.history, earlier = history, state.history
    history.rolled_back(earlier, at=left, to=state.step, cursor=state.cursor)
    logger.warning(
        "Back from step %d to step %d, from %s; training goes on with sample %d.",
        left,
        state.step,
        where,
        state.cursor,
    )
    return ReplicaEvent("rolled_back", {"to": state.step, "from": where, "sample": state.cursor})
