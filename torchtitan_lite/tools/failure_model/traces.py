"""Traces of machines that come and go, such as spot instances: reading, and replay as a slots file.

The format is that of Oobleck's simulator (SOSP 2023, tools/simulator/traces): lines
`MILLISECONDS,add,NODE` and `MILLISECONDS,remove,NODE`, in the order of time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.tools.failure_model.events import ClusterEvents

_MAX_BYTES = 16 << 20
_FORM = "MILLISECONDS,add,NODE or MILLISECONDS,remove,NODE"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Machines over time."""

    initial: frozenset[int]
    """Machines that are there when the trace begins: a state, and not events."""
    changes: Sequence[ClusterEvents]
    """Later changes, one for each time, in seconds since the begin."""
    duration_s: float

    @property
    def num_losses(self) -> int:
        """Number of machines that are lost."""
        return sum(len(change.lost) for change in self.changes)

    @property
    def num_interruptions(self) -> int:
        """Number of times at which machines are lost."""
        return sum(bool(change.lost) for change in self.changes)

    @property
    def most_machines(self) -> int:
        """Largest number of machines at any time."""
        return max(len(present) for _, present in self.states())

    def states(self) -> Iterator[tuple[float, frozenset[int]]]:
        """Yield the machines that are there from each time on."""
        present = self.initial
        yield 0.0, present
        for change in self.changes:
            present = (present - change.lost) | change.arrived
            yield change.at_s, present


def read_trace(path: Path) -> Trace:
    """Read a trace. It begins with the first line, and ends with the last one. Raises DataError
    that names the line, OSError."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES >> 20} MiB, the limit of a trace.")
    changes: dict[float, tuple[set[int], set[int]]] = {}
    numbers: dict[str, int] = {}
    present: set[int] = set()
    last_ms = 0
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        at_ms, kind, node = _parsed(path, number, line)
        if at_ms < last_ms:
            raise DataError(f"{path}, line {number}: {at_ms} ms is before the line above.")
        last_ms = at_ms
        machine = numbers.setdefault(node, len(numbers))
        is_new = machine not in present
        if is_new != (kind == "add"):
            state = "absent" if is_new else "present"
            raise DataError(f"{path}, line {number}: {kind} of {node}, which is {state}.")
        arrived, lost = changes.setdefault(at_ms / 1000, (set(), set()))
        if kind == "add":
            present.add(machine)
            arrived.add(machine)
        else:
            present.remove(machine)
            if machine in arrived:
                # A machine that comes and goes at the same time never was there.
                arrived.remove(machine)
            else:
                lost.add(machine)
    if not changes:
        raise DataError(f"{path} is empty, must have lines {_FORM}.")
    begin_s = min(changes)
    initial = frozenset(changes.pop(begin_s)[0])
    events = [
        ClusterEvents(at_s=at_s - begin_s, arrived=frozenset(arrived), lost=frozenset(lost))
        for at_s, (arrived, lost) in changes.items()
        if arrived or lost
    ]
    return Trace(initial=initial, changes=events, duration_s=last_ms / 1000 - begin_s)


def slots(trace: Trace, num_replicas: int, ranks: int) -> Iterator[tuple[float, Mapping[str, int]]]:
    """Yield the content of the launcher's `--slots-file` from each time on, if each machine of the
    trace runs one of the `ranks` of a replica. A machine stays with its replica; one that arrives
    joins the replica with the fewest machines, and is unused if all replicas are full."""
    members: list[set[int]] = [set() for _ in range(num_replicas)]
    for at_s, present in trace.states():
        for machines in members:
            machines &= present
        for machine in sorted(present.difference(*members)):
            smallest = min(members, key=len)
            if len(smallest) < ranks:
                smallest.add(machine)
        yield at_s, {str(replica): len(machines) for replica, machines in enumerate(members)}


def _parsed(path: Path, number: int, line: str) -> tuple[int, str, str]:
    parts = [part.strip() for part in line.split(",")]
    is_known = len(parts) == 3 and parts[0].isdecimal() and parts[1] in ("add", "remove")
    if not is_known or not parts[2]:
        raise DataError(f"{path}, line {number} is {line[:80]!r}, must be {_FORM}.")
    return int(parts[0]), parts[1], parts[2]
