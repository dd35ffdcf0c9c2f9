"""Goodput: wall time since the first start of a run, by what it was spent on.

The seconds of all kinds add up to the wall time exactly; they are counted in whole nanoseconds. The
file survives the process: the time between the last entry of one generation and the start of the
next is idle, and retaken steps turn their earlier time into lost work. The leader of a replica
tracks it. Compilation is counted separately from the phase in which it happens.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import withholds_outputs
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.outputs import EARLIER_GOODPUT_FILE, GOODPUT_FILE
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.core.rank.supervised import generation_age_s
from torchtitan_lite.distributed.torch_compat import compile_time_ns

LOST = "lost"
WORK = ("compute", "communication", "data")
"""Kinds of time that are lost with their step."""
_NUM_UNMERGED = 32
"""Number of newest entries that are not merged."""
_MAX_ENTRIES = 128


@dataclass
class Entry:
    """Time of the steps `first` to `last`, in nanoseconds by kind."""

    first: int
    last: int
    ns: Counter[str]


class TimeByStep:
    """The time of a run by step.

    The newest steps have an entry each; older entries cover more steps. A run that rolls back into
    such an entry loses a proportional share of it.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = list(entries)
        self.totals: Counter[str] = sum((entry.ns for entry in entries), Counter())
        """Nanoseconds by kind."""

    @property
    def highest(self) -> int:
        """The last step that has its own time."""
        return self._entries[-1].last if self._entries else 0

    def add(self, step: int, ns: Mapping[str, int]) -> None:
        """Add time of `step`, the highest or the next one; a lower one counts as the highest."""
        step = max(step, self.highest)
        if not self._entries or self._entries[-1].first != step:
            self._entries.append(Entry(step, step, Counter()))
        entry, totals = self._entries[-1].ns, self.totals
        for kind, elapsed in ns.items():
            entry[kind] += elapsed
            totals[kind] += elapsed
        if len(self._entries) > _MAX_ENTRIES:
            self._merge()

    def lose_after(self, step: int) -> None:
        """Turn the time of the steps after `step` into lost work, because they are retaken."""
        while self._entries and self._entries[-1].first > step:
            entry = self._entries.pop()
            self._lose(entry.ns, 1, 1)
            if self._entries:
                self._entries[-1].ns.update(entry.ns)
            else:
                self._entries.append(Entry(step, step, entry.ns))
        if self._entries and self._entries[-1].last > step:
            entry = self._entries[-1]
            self._lose(entry.ns, entry.last - step, entry.last - entry.first + 1)
            entry.last = step

    def _lose(self, ns: Counter[str], share: int, of: int) -> None:
        before = Counter(ns)
        lose_work(ns, share, of)
        self.totals.update(ns)
        self.totals.subtract(before)

    def _merge(self) -> None:
        """Merge neighboring entries, except the newest."""
        old, new = self._entries[:-_NUM_UNMERGED], self._entries[-_NUM_UNMERGED:]
        joined = []
        for place in range(0, len(old), 2):
            pair = old[place : place + 2]
            joined.append(
                Entry(pair[0].first, pair[-1].last, sum((entry.ns for entry in pair), Counter()))
            )
        self._entries = joined + new

    def to_json(self) -> list[list[Any]]:
        """Return the entries, each [first, last, {kind: nanoseconds}]."""
        return [[entry.first, entry.last, dict(entry.ns)] for entry in self._entries]

    @staticmethod
    def from_json(entries: Any) -> "TimeByStep":
        """Restore from `to_json`. Raises ValueError for anything else."""
        if not isinstance(entries, list):
            raise ValueError("entries is not a list")
        parsed: list[Entry] = []
        for entry in entries:
            match entry:
                case [int(first), int(last), dict(ns)] if (
                    parsed[-1].last if parsed else 0
                ) <= first <= last and all(
                    type(duration_ns) is int and duration_ns >= 0 for duration_ns in ns.values()
                ):
                    parsed.append(Entry(first, last, Counter(ns)))
                case _:
                    raise ValueError(f"{entry!r:.80} is not an entry")
        return TimeByStep(parsed)


def lose_work(ns: Counter[str], share: int = 1, of: int = 1) -> None:
    """Turn the fraction `share` / `of` of the work in `ns` into lost time."""
    for kind in WORK:
        lost = ns[kind] * share // of
        if lost:
            ns[kind] -= lost
            ns[LOST] += lost


COMPILE, IDLE = "compile", "idle"
KINDS = (*(phase.value for phase in Phase), COMPILE, LOST, IDLE)
USEFUL = (Phase.COMPUTE.value, Phase.COMMUNICATION.value)
"""Kinds that count as goodput, if their step was committed and kept."""
_VERSION = 1
_WRITE_EVERY_S = 1.0
"""Time that a killed process may not have recorded; it counts as idle."""
_MIN_SHIFT_NS = 10**8
"""Smallest change of the wall clock that counts as one."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class TimeTotals:
    """Totals at one point in time."""

    ns: Mapping[str, int]
    """Nanoseconds by kind, in the order of KINDS."""

    @property
    def wall_s(self) -> float:
        return sum(self.ns.values()) / 1e9

    @property
    def goodput(self) -> float:
        """Fraction of wall time in committed and kept steps: forward, backward, reductions and
        update."""
        return sum(self.ns[kind] for kind in USEFUL) / max(1, sum(self.ns.values()))

    def values(self) -> dict[str, float]:
        """Return seconds, for an event."""
        seconds = {f"{kind}_s": ns / 1e9 for kind, ns in self.ns.items()}
        return {"goodput": self.goodput, "wall_s": self.wall_s, **seconds}


@dataclass(frozen=True)
class Boot:
    """One start of a machine, and how its wall clock differs from the time since."""

    id: str
    wall_minus_boot_ns: int

    def to_json(self) -> list[object]:
        """Return it as JSON values."""
        return [self.id, self.wall_minus_boot_ns]

    def shift_ns(self, recorded: Any) -> int:
        """Return by how much the wall clock was set ahead since a record of the same boot."""
        match recorded:
            case [self.id, int(wall_minus_boot_ns)]:
                shift_ns = self.wall_minus_boot_ns - wall_minus_boot_ns
                # Less is only the time between the readings of two clocks.
                return shift_ns if abs(shift_ns) >= _MIN_SHIFT_NS else 0
            case _:
                return 0


class GoodputTracker:
    """A listener of the loop's phases. Use `open_goodput_tracker`."""

    def __init__(
        self,
        path: Path,
        *,
        started_ns: int,
        resumes: bool,
        clock: Callable[[], int],
        compiled_ns: Callable[[], int] = compile_time_ns,
        faults: OutputFaults | None = None,
        boot: Boot | None = None,
    ) -> None:
        """Continue the record at `path` if this process `resumes` its run, otherwise start a new
        one. `started_ns` is the start of the process by `clock`, nanoseconds since 1970 that
        never decrease; `compiled_ns` is the compiler's time so far; `faults` records failures of
        the disk. `boot` tells a change of the clock from the time between two processes."""
        self._faults = faults or OutputFaults()
        self._path, self._clock, self._compiled_ns = path, clock, compiled_ns
        self._time_by_step, first_ns, until_ns = TimeByStep(), started_ns, started_ns
        if resumes and path.exists():
            self._time_by_step, first_ns, until_ns = _read(path, started_ns, boot)
        self._boot = boot
        self._first_ns = first_ns
        # If the clock was set back in the meantime, no time must be counted twice.
        self._ahead_ns = max(0, until_ns - started_ns)
        self._open: Counter[str] = Counter({IDLE: max(0, started_ns - until_ns)})
        """Time of the current attempt at a step."""
        self._before = -1
        """Last committed step when the attempt began."""
        self._is_kept = True
        """Whether the attempt has no work that would be lost if the process ended now."""
        self._phase, self._since_ns = Phase.START.value, started_ns + self._ahead_ns
        self._entered_ns = self._since_ns
        self._compiled_before = compiled_ns()
        self._step = 0
        self._write()

    def entered(self, phase: Phase, step: int) -> None:
        self._count()
        self._entered_ns = self._since_ns
        if phase is Phase.QUORUM and self._is_kept:
            self._time_by_step.add(step, self._open)
            self._open.clear()
            self._before, self._is_kept = step, False
        elif phase is Phase.DATA:
            if step < self._time_by_step.highest:
                # The run was rolled back: an earlier attempt has run these steps.
                self._time_by_step.lose_after(step)
        elif phase in (Phase.CHECKPOINT, Phase.END) and not self._is_kept:
            self._is_kept = True
            if step <= self._before:
                lose_work(self._open)
        self._phase, self._step = phase.value, step
        if self._since_ns - self._written_ns >= _WRITE_EVERY_S * 1e9:
            self._write()

    def device_worked(self, phase: Phase, ended_ago_s: float) -> None:
        """Count the current phase until `ended_ago_s` seconds ago as `phase`."""
        self._count()
        worked_ns = max(0, self._since_ns - round(ended_ago_s * 1e9) - self._entered_ns)
        moved_ns = min(worked_ns, self._open[self._phase])
        self._open[self._phase] -= moved_ns
        self._open[phase.value] += moved_ns
        self._entered_ns += moved_ns

    def goodput(self) -> float:
        """Return `totals().goodput`, at a lower cost."""
        self._count()
        committed, attempt = self._time_by_step.totals, self._open
        useful = sum(committed[kind] for kind in USEFUL)
        if self._is_kept:
            useful += sum(attempt[kind] for kind in USEFUL)
        return useful / max(1, self._since_ns - self._first_ns)

    def totals(self) -> TimeTotals:
        """Return the totals; a step counts once it is committed."""
        self._count()
        return self._totals(self._attempt_if_ended_now())

    def close(self) -> None:
        """Write the final record."""
        self._count()
        self._write()

    def _count(self) -> None:
        """Add the time since the last call to the current phase."""
        now_ns, compiled = self._clock() + self._ahead_ns, self._compiled_ns()
        elapsed = now_ns - self._since_ns
        compiling = min(elapsed, max(0, compiled - self._compiled_before))
        self._open[self._phase] += elapsed - compiling
        self._open[COMPILE] += compiling
        self._since_ns, self._compiled_before = now_ns, compiled

    def _attempt_if_ended_now(self) -> Counter[str]:
        """Return the time of the current attempt if the process ended now."""
        ns = Counter(self._open)
        if not self._is_kept:
            lose_work(ns)
        return ns

    def _totals(self, attempt: Mapping[str, int]) -> TimeTotals:
        committed = self._time_by_step.totals
        return TimeTotals({kind: committed[kind] + attempt.get(kind, 0) for kind in KINDS})

    def _write(self) -> None:
        """Replace the file in one rename, with the current attempt as if it ended here."""
        self._written_ns = self._since_ns
        if withholds_outputs():
            return
        attempt = self._attempt_if_ended_now()
        step = max(self._step, self._time_by_step.highest)
        content = {
            "version": _VERSION,
            "first_start_ns": self._first_ns,
            "until_ns": self._since_ns,
            **({} if self._boot is None else {"boot": self._boot.to_json()}),
            # Readers of the file use these values.
            **self._totals(attempt).values(),
            "entries": [*self._time_by_step.to_json(), [step, step, attempt]],
        }
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content))
            os.replace(temporary, self._path)
        except OSError as error:
            self._faults.failed(self._path.name, error)
            with suppress(OSError):
                # It may be what fills the disk.
                temporary.unlink()
        else:
            self._faults.works(self._path.name)


def open_goodput_tracker(
    folder: Path, *, resumes: bool, faults: OutputFaults | None = None
) -> GoodputTracker:
    """Return the tracker of the record in `folder`, of a run that this process started or, if
    `resumes`, continues. `faults` records failures of the disk."""
    path = folder / GOODPUT_FILE
    if resumes and not path.exists():
        with suppress(OSError):
            (folder / EARLIER_GOODPUT_FILE).rename(path)
    began_ns = time.time_ns() - time.monotonic_ns()
    return GoodputTracker(
        path,
        started_ns=time.time_ns() - round(process_age_s() * 1e9),
        resumes=resumes,
        # Monotonic within a process.
        clock=lambda: began_ns + time.monotonic_ns(),
        faults=faults,
        boot=_present_boot(),
    )


def _present_boot() -> Boot | None:
    """Return the present boot of this machine; None where the system does not name it."""
    try:
        boot_id = Path(_BOOT_ID).read_text().strip()
    except OSError:
        return None
    return Boot(boot_id, time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def process_age_s() -> float:
    """Return the seconds since the process was started, interpreter start and imports included; in
    a process that trains again after another rank was lost, the seconds since that loss."""
    if (age_s := generation_age_s()) is not None:
        return age_s
    created_s = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):
        # psutil adds the boot time, which Linux reports in whole seconds only.
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, up_s - (created_s - psutil.boot_time()))
    return max(0.0, time.time() - created_s)


def _read(path: Path, now_ns: int, boot: Boot | None) -> tuple[TimeByStep, int, int]:
    """Read the time by step, the first start and the last entry, both by the present clock if this
    machine has not been started since; start a new record if the file is damaged."""
    try:
        content: Any = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(f"its version is not {_VERSION}")
        time_by_step = TimeByStep.from_json(content.get("entries"))
        first_ns, until_ns = content.get("first_start_ns"), content.get("until_ns")
        if not isinstance(first_ns, int) or not isinstance(until_ns, int):
            raise ValueError("first_start_ns or until_ns is missing")
        if unknown := time_by_step.totals.keys() - set(KINDS):
            raise ValueError(f"{min(unknown)} is not a kind of time")
        if time_by_step.totals.total() != until_ns - first_ns:
            raise ValueError("its seconds do not add up")
        shift_ns = 0 if boot is None else boot.shift_ns(content.get("boot"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is damaged, and time accounting starts again: %s", path, error)
        return TimeByStep(), now_ns, now_ns
    return time_by_step, first_ns + shift_ns, until_ns + shift_ns
