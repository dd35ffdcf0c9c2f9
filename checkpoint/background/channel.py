"""The writer's side of its pipes, and the settings that it receives: orders in, responses out, one
JSON line each.

Invariant: a dead trainer ends the orders, and never the writer.
"""

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """Settings of a writer, sent as one line of JSON."""

    nice: int = 10
    """Increment of the process's niceness; 0 keeps it."""
    io_idle: bool = True
    """Use the disk only when it is idle, if the I/O scheduler supports that."""
    bytes_per_s: float | None = None
    """Maximum write rate while the trainer lives; None for no limit."""
    direct_io: bool = True
    """Bypass the page cache if the filesystem supports direct I/O."""
    preemption_grace_s: float = 30.0
    """Maximum time that a writer may outlive its trainer."""
    signals_fd: int = -1
    """Descriptor that receives the trainer's signals; -1 for none."""
    others_s: float = 0.7
    """After the trainer's death, how long other ranks may still complete a newer step."""
    commit_timeout_s: float = 1800.0
    """How long the leader waits for the parts of the other ranks."""
    keep_latest_k: int = 0
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept, too; 0 for none."""
    shared_run_folder: str = ""
    """Folder of the run, which has its fencing tokens; empty without other replicas."""
    replica: int = 0
    """Index of this replica in the run."""
    leases: tuple[str, ...] = ()
    """Leases of the run's folders, as paths or URLs."""
    storages: Mapping[str, str] = field(default_factory=dict)
    """Scheme -> MODULE:CLASS of the filesystems that the user has registered."""
    recovers: bool = True
    """Remove leftovers of other processes: no other run saves there."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "WriterSettings":
        """Parse the form of `to_json`. Raises ValueError for an unknown key."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"Unknown settings of a writer: {', '.join(sorted(unknown))}.")
        return cls(**values)


class WriterChannel:
    """Non-blocking reader and writer of JSON lines."""

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._partial = b""
        self._orders: list[dict[str, Any]] = []
        self._signals: int | None = None
        self.ended_at: float | None = None
        """When the trainer's end was detected (time.monotonic())."""
        self.stop_requested = False
        """Whether the trainer has received a stop signal."""

    @property
    def ended(self) -> bool:
        """Whether the trainer closed its end, or died."""
        return self.ended_at is not None

    def listen_to_signals(self, descriptor: int) -> None:
        """Read the trainer's signals from `descriptor`, where its C-level handler writes one byte
        each, even while the trainer hangs."""
        self._signals = descriptor

    def next_order(self) -> dict[str, Any] | None:
        """Block until the next order and return it; None at the end of the orders."""
        while not self._orders and not self.ended:
            self.poll(None)
        return self._orders.pop(0) if self._orders else None

    def poll(self, timeout_s: float | None = 0.0) -> list[dict[str, Any]]:
        """Read available input, waiting at most `timeout_s`, and return all pending orders."""
        if self.ended:
            return self._orders
        # `select` does not support descriptors above 1023, and the trainer chose the one of the
        # signals.
        poll = select.poll()
        for source in (self._incoming, self._signals):
            if source is not None:
                poll.register(source, select.POLLIN)
        wait_ms = None if timeout_s is None else timeout_s * 1000
        ready = {descriptor for descriptor, _ in poll.poll(wait_ms)}
        if self._signals in ready:
            assert self._signals is not None
            numbers = os.read(self._signals, _READ_BYTES)
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self.stop_requested = True
            if not numbers:
                self._signals = None
        if self._incoming in ready:
            content = os.read(self._incoming, _READ_BYTES)
            if not content:
                # The trainer's death may have cut off an incomplete line.
                self.ended_at = time.monotonic()
                return self._orders
            *lines, self._partial = (self._partial + content).split(b"\n")
            self._orders += [json.loads(line) for line in lines if line.strip()]
        return self._orders

    def send(self, **response: Any) -> None:
        """Send a response to the trainer, if it is alive."""
        try:
            os.write(self._outgoing, json.dumps(response).encode() + b"\n")
        except OSError:
            # The trainer is dead; the writer continues without it.
            return


def ignore_stop_signals() -> None:
    """Ignore signals that are meant for the trainer: its background processes end after it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def own_output() -> int:
    """Return a descriptor of the pipe to the trainer that nothing else uses: output of libraries is
    redirected to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    # Earlier output may have left an incomplete line.
    with suppress(BrokenPipeError):
        # A dead trainer is detected at the end of the orders.
        os.write(own, b"\n")
    return own
