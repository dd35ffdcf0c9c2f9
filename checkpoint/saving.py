"""What is saved and where: what both ways to save have in common. Layer: above inventory."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchtitan_lite import __version__, rng
from torchtitan_lite.checkpoint.background.coworkers import Coworkers
from torchtitan_lite.checkpoint.background.save import attempt_token
from torchtitan_lite.checkpoint.identity import Identity
from torchtitan_lite.checkpoint.inventory import Inventory, layouts_json
from torchtitan_lite.checkpoint.memory.description import Description
from torchtitan_lite.checkpoint.state import State
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.schema.checkpoint import CheckpointConfig
from torchtitan_lite.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A run, as its savers see it."""

    config: CheckpointConfig
    state: State
    mesh: Mesh
    storage: Storage
    identity: Identity
    run_config: Mapping[str, Any]
    spec: ModelSpec | None = None
    """The model, where that may be loaded from a Hugging Face folder."""
    is_shared: bool = False
    """Other replicas save in the same place."""
    last_step: int | None = None
    """At which the run ends, where that is known."""

    def describe(self, inventory: Inventory) -> Description:
        """What this rank holds, and what it writes."""
        return Description(
            run_id=self.identity.run_id,
            session=self.identity.session,
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            root=self.storage.root,
            is_leader=self.mesh.is_leader,
            mesh=asdict(self.mesh.degrees),
            config=self.run_config,
            versions={"torchtitan_lite": __version__, "torch": torch.__version__},
            layouts=layouts_json(inventory.layouts),
            tensors=inventory.held(),
            file_layouts=layouts_json(inventory.file_layouts),
            file_name=inventory.file_name,
            boxes=tuple(inventory.boxes),
        )

    def values(self) -> dict[str, Any]:
        """All of the state that is not tensors, of this moment."""
        return {"values": self.state.values(), "rng": rng.capture()}


class Attempts:
    """Names for attempts at saving: new ones each time, and the same on all that write together."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._counts: dict[tuple[str, int], int] = {}

    def next(self, coworkers: Coworkers, step: int) -> str:
        """The token of the next attempt at a step. Coworkers begin theirs at the same steps."""
        session = coworkers.token or self._session
        # Never the same again, also where the run went back and comes to the step once more.
        self._counts[session, step] = self._counts.get((session, step), 0) + 1
        return attempt_token(session, step, self._counts[session, step])


def attempt(action: Callable[[], Any]) -> str | None:
    """Run `action`; the error's text instead of the error, since all ranks must reach the next
    collective."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
