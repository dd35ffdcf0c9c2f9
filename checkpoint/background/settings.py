"""What the trainer tells its writer at the start. Layer: imports nothing of the project."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """How a writer works. Travels as one line of JSON."""

    nice: int = 10
    """Added to the niceness of the process; 0 leaves it."""
    io_idle: bool = True
    """Use the disk only while nobody else does, where the I/O scheduler knows that."""
    bytes_per_s: float | None = None
    """The most that is written in a second while the trainer lives; None: no limit."""
    direct_io: bool = True
    """Write past the page cache where the filesystem can."""
    preemption_grace_s: float = 30.0
    """The most by which a writer may outlive its trainer."""
    signals_fd: int = -1
    """Where the trainer's signals can be read; -1: nowhere."""
    others_s: float = 0.7
    """After the death of its trainer, how long other ranks may still complete a newer step."""
    commit_timeout_s: float = 1800.0
    """How long the leader waits for the other ranks' parts of a step."""
    keep_latest_k: int = 0
    """Newest checkpoints that stay; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides stay, too; 0: none."""
    recovers: bool = True
    """Remove what others have left there: nobody else saves there at the same time."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "WriterSettings":
        """What `to_json` gave. Raises ValueError for a key that is unknown."""
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"Unknown settings of a writer: {', '.join(sorted(unknown))}.")
        return cls(**given)
