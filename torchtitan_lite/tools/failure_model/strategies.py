"""The strategies that the failure model compares."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Reaction of a job to the loss of a rank or a machine."""

    name: str
    """Word for the command line and for files."""
    title: str
    replicas: Literal["torchft", "ours"] | None = None
    """Implementation of replicas, if the job has replicas."""
    in_place: bool = False
    """Whether a warm spare replaces a dead rank while the other ranks keep their processes."""
    snapshots: bool = False
    """Whether a job whose machines are all there resumes from shared memory."""
    buddies: bool = False
    """Whether the state of a lost machine is in the memory of another machine."""


STRATEGIES = (
    Strategy(name="restart", title="restart from storage"),
    Strategy(name="torchft", title="torchft replicas", replicas="torchft"),
    Strategy(name="replicas", title="this project's replicas", replicas="ours", snapshots=True),
    Strategy(name="spares", title="this project, spares", in_place=True, snapshots=True),
    Strategy(
        name="buddies",
        title="this project, spares and buddies",
        in_place=True,
        snapshots=True,
        buddies=True,
    ),
)
