"""What a kind of fault is. Layer: above scene."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.chaos.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom a fault strikes."""

    scene: Scene
    replica: int
    draw: random.Random
    """For what else there is to choose."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which a machine, a process or a file fails."""

    name: str
    strike: Callable[[Target], None]
    """Do it, and undo at the end what does not mend itself. Raises Missed where there is nothing to
    strike."""
    restarts_launcher: bool = False
    """The launcher itself is ended by it, and has to be started again."""

    @property
    def words(self) -> str:
        """For people."""
        return self.name.replace("_", " ")


def kinds_of(*strikes: Callable[[Target], None]) -> dict[str, Kind]:
    """A kind for each function, by its name."""
    return {one.__name__: Kind(name=one.__name__, strike=one) for one in strikes}
