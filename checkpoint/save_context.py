"""What both savers share: the run, its state, attempts, retries, and the signals between ranks."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.background.save import WriterGroup, attempt_token
from torchtitan_lite.checkpoint.history.fencing_tokens import FencingTokens
from torchtitan_lite.checkpoint.history.identity import RunIdentity
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.checkpoint.save_plan import SavePlan, layouts_json
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.core import rng
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelSpec

PARTS: tuple[str, ...] = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""Parts of a training state, by the names used in `exclude_from_loading`."""
_MOST_DOUBLINGS = 6


class Checkpointable(Protocol):
    """Protocol of a training state that can be saved and restored."""

    @property
    def step(self) -> int:
        """Number of committed steps."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, prefixed with `part.`; DTensors if sharded."""
        ...

    def values(self) -> dict[str, Any]:
        """Return the rest of the state as plain JSON values, by part."""
        ...

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate tensors that exist only after a first step, given all saved names and their
        global shapes, so that `tensors` includes them."""
        ...

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore what `values` returned, or the given parts of it."""
        ...


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """A run from the perspective of its savers and its restorer."""

    config: CheckpointConfig
    state: Checkpointable
    mesh: Mesh
    storage: Storage
    identity: RunIdentity
    lineage: SnapshotLineage
    run_config: Mapping[str, Any]
    spec: ModelSpec | None = None
    """The model, if it may be loaded from a Hugging Face folder."""
    fencing_tokens: FencingTokens | None = None
    """Fencing tokens of the run, if other replicas save to the same storage."""
    leases: tuple[str, ...] = ()
    """Leases of the run's folders, as paths or URLs."""
    last_step: int | None = None
    """Final step of the run, if known."""

    @property
    def is_shared(self) -> bool:
        """Whether other replicas save to the same storage."""
        return self.fencing_tokens is not None

    def describe(self, plan: SavePlan) -> RegionDescription:
        """Describe the tensors that this rank holds and the boxes that it writes."""
        return RegionDescription(
            run_id=self.identity.run_id,
            generation_id=self.identity.generation_id,
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            root=self.storage.root,
            is_leader=self.mesh.is_leader,
            mesh=asdict(self.mesh.degrees),
            config=self.run_config,
            versions={"torchtitan_lite": __version__, "torch": torch.__version__},
            layouts=layouts_json(plan.layouts),
            tensors=plan.held_tensors(),
            file_layouts=layouts_json(plan.file_layouts),
            file_name=plan.tensor_file_name,
            boxes=tuple(plan.boxes),
        )

    def values(self) -> dict[str, Any]:
        """Return the current non-tensor state of a snapshot or a save."""
        self.lineage.write_pending()
        return {
            "values": self.state.values(),
            "rng": rng.capture(),
            "segment": self.lineage.segment,
        }


@dataclass
class SaveSignals:
    """Save status of one rank, or of all ranks after summation."""

    failed: float = 0.0
    """Nonzero if this rank's part of the save in progress failed."""
    committed: float = 0.0
    """Nonzero if the save in progress is committed; set by the leader."""
    save_pending: float = 0.0
    """Nonzero if a pending save may begin after this step."""
    copy_s: float = 0.0
    """Seconds of the last snapshot copy."""
    step_s: float = 0.0
    """Seconds of the last step."""
    snapshot_failed: float = 0.0
    """Nonzero if the last snapshot is incomplete."""
    buddy_pending: float = 0.0
    """Nonzero if this rank has not received all buddy copies of the step being copied."""
    buddy_failed: float = 0.0
    """Nonzero if it cannot receive them."""
    buddy_stuck: float = 0.0
    """Nonzero if it receives nothing."""

    def to_list(self) -> list[float]:
        """Return the fields in order."""
        return list(astuple(self))


NUM_SAVE_SIGNALS = len(SaveSignals().to_list())


class AttemptTokens:
    """Tokens of save attempts: unique per attempt, and equal on all writers of a group."""

    def __init__(self, prefix: str) -> None:
        """`prefix` is that of attempts of a single writer group, unique to the generation."""
        self._prefix = prefix
        self._counts: dict[tuple[str, int], int] = {}

    def next(self, writer_group: WriterGroup, step: int) -> str:
        """Return the token of the next attempt at `step`. All writers of a group attempt the same
        steps."""
        prefix = writer_group.token or self._prefix
        # Never reused, even if the run rolls back and reaches the step again.
        self._counts[prefix, step] = self._counts.get((prefix, step), 0) + 1
        return attempt_token(prefix, step, self._counts[prefix, step])


class RetryBackoff:
    """Exponential backoff in steps: 1, 2, 4, ... up to 64 steps after consecutive failures."""

    def __init__(self) -> None:
        self.consecutive_failures = 0
        self._from = 0

    def failed(self, step: int) -> None:
        """Record a failed save, detected at `step`."""
        self._from = step + 2 ** min(self.consecutive_failures, _MOST_DOUBLINGS)
        self.consecutive_failures += 1

    def succeeded(self) -> None:
        """Record a durable save."""
        self.consecutive_failures = 0

    def may_retry(self, step: int) -> bool:
        """Return whether a pending save may begin at `step`."""
        return step >= self._from


def capture_error(action: Callable[[], Any]) -> str | None:
    """Run `action` and return its error as text instead of raising, because all ranks must reach
    the next collective."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
