"""What both savers share: the run, its state, attempts, retries, and the signals between ranks."""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.background.save import WriterGroup, attempt_token
from torchtitan_lite.checkpoint.history.fencing_tokens import RunHistory
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.checkpoint.save_plan import SavePlan, layouts_json
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelSpec

PARTS: tuple[str, ...] = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""Parts of a training state, by the names used in `exclude_from_loading`."""
_FILE = "run_id"
_TRIES, _POLL_S = 50, 0.1
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
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


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run and of one session of it."""

    run_id: str
    """32 hexadecimal digits, stored in the run's folder; deleting that file begins a new run. Each
    replica derives its own."""
    session: str
    """Unique to every start of the run, and common to all ranks."""


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
    history: RunHistory | None = None
    """Fencing tokens of the run, if other replicas save to the same storage."""
    leases: tuple[str, ...] = ()
    """Leases of the run's folders, as paths or URLs."""
    last_step: int | None = None
    """Final step of the run, if known."""

    @property
    def is_shared(self) -> bool:
        """Whether other replicas save to the same storage."""
        return self.history is not None

    def describe(self, plan: SavePlan) -> RegionDescription:
        """Describe the tensors that this rank holds and the boxes that it writes."""
        return RegionDescription(
            run_id=self.identity.run_id,
            session=self.identity.session,
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

    def __init__(self, session: str) -> None:
        self._session = session
        self._counts: dict[tuple[str, int], int] = {}

    def next(self, writer_group: WriterGroup, step: int) -> str:
        """Return the token of the next attempt at `step`. All writers of a group attempt the same
        steps."""
        session = writer_group.token or self._session
        # Never reused, even if the run rolls back and reaches the step again.
        self._counts[session, step] = self._counts.get((session, step), 0) + 1
        return attempt_token(session, step, self._counts[session, step])


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


def agree_on_identity(dump_folder: Path, mesh: Mesh, replica: int = 0) -> RunIdentity:
    """Return the run's identity, which the leader reads or creates and broadcasts. Every rank must
    call it."""
    payload = b""
    if mesh.is_leader:
        run_id = replica_run_id(shared_run_id(dump_folder), replica)
        payload = json.dumps([run_id, secrets.token_hex(6)]).encode()
    run_id, session = json.loads(broadcast_bytes(payload))
    return RunIdentity(run_id, session)


def replica_run_id(run_id: str, replica: int) -> str:
    """Return the run id under which a replica keeps its snapshots."""
    if replica == 0:
        return run_id
    return hashlib.blake2b(f"{run_id} {replica}".encode(), digest_size=16).hexdigest()


def shared_run_id(dump_folder: Path) -> str:
    """Return the id of the run in `dump_folder`, which all its replicas share; create it if there
    is none. Raises CheckpointError."""
    path = dump_folder / _FILE
    known = path.read_text().strip() if path.is_file() else ""
    if _RUN_ID.fullmatch(known):
        return known
    dump_folder.mkdir(parents=True, exist_ok=True)
    if known:
        path.unlink(missing_ok=True)
    # Replicas start concurrently: one of them creates the name, in a single write.
    with suppress(FileExistsError), path.open("x") as file:
        file.write(secrets.token_hex(16) + "\n")
    for _ in range(_TRIES):
        known = path.read_text().strip()
        if _RUN_ID.fullmatch(known):
            return known
        time.sleep(_POLL_S)
    raise CheckpointError(f"{path} is not a run id: delete it to begin a new run.")
