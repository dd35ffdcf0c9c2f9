"""The books of a run: every second of wall time since its first start, by what it went into.
Layer: above ledger and phases.

Invariant: the seconds of all kinds add up to the wall time, exactly; they are counted in whole
nanoseconds. The books survive the process: what lies between the last entry of one attempt and the
start of the next is idle, and steps that are taken again make what they took before lost work.

They are those of the leader of a replica. Time that the compiler takes is counted apart from the
phase in which it does.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torchtitan_lite.log import logger
from torchtitan_lite.metrics.ledger import LOST, Ledger, lose_work
from torchtitan_lite.outputs import BOOKS
from torchtitan_lite.phases import Phase
from torchtitan_lite.torch_compat import compile_time_ns

COMPILE, IDLE = "compile", "idle"
KINDS = (*(phase.value for phase in Phase), COMPILE, LOST, IDLE)
USEFUL = (Phase.COMPUTE.value, Phase.COMMUNICATION.value)
"""What goodput counts, of steps that were committed and are kept."""
_VERSION = 1
_WRITE_EVERY_S = 1.0
"""What a process that is killed may leave out, and then counts as idle."""


@dataclass(frozen=True)
class Accounts:
    """The books at one moment."""

    ns: Mapping[str, int]
    """By kind, in the order of KINDS, all of them."""

    @property
    def wall_s(self) -> float:
        return sum(self.ns.values()) / 1e9

    @property
    def goodput(self) -> float:
        """The share of wall time that went into steps that were committed and are kept: forward,
        backward, sums and update, 0 to 1."""
        return sum(self.ns[kind] for kind in USEFUL) / max(1, sum(self.ns.values()))

    def values(self) -> dict[str, float]:
        """In seconds, for an event."""
        seconds = {f"{kind}_s": ns / 1e9 for kind, ns in self.ns.items()}
        return {"goodput": self.goodput, "wall_s": self.wall_s, **seconds}


class Books:
    """Listens to the phases of the loop. Made by `open_books`."""

    def __init__(
        self,
        path: Path,
        *,
        started_ns: int,
        goes_on: bool,
        clock: Callable[[], int],
        compiled_ns: Callable[[], int] = compile_time_ns,
    ) -> None:
        """The books at `path`, where `goes_on` says that this process continues the run to which
        those that lie there belong. `started_ns` is when the process began, by `clock`, which
        gives nanoseconds since 1970 and never goes back; `compiled_ns` what the compiler has taken
        up to now."""
        self._path, self._clock, self._compiled_ns = path, clock, compiled_ns
        self._ledger, first_ns, until_ns = Ledger(), started_ns, started_ns
        if goes_on and path.exists():
            self._ledger, first_ns, until_ns = _read(path, started_ns)
        self._first_ns = first_ns
        # A clock that was set back since must not make time twice.
        self._ahead_ns = max(0, until_ns - started_ns)
        self._open: Counter[str] = Counter({IDLE: max(0, started_ns - until_ns)})
        """Of the attempt at a step that is under way."""
        self._before = -1
        """The last committed step when the attempt began."""
        self._is_kept = True
        """Whether there is no work in the attempt that would be lost if the process ended now."""
        self._phase, self._since_ns = Phase.START.value, started_ns + self._ahead_ns
        self._compiled_before = compiled_ns()
        self._step = 0
        self._has_failed = False
        self._write()

    def entered(self, phase: Phase, step: int) -> None:
        self._count()
        if phase is Phase.QUORUM and self._is_kept:
            self._ledger.add(step, self._open)
            self._open.clear()
            self._before, self._is_kept = step, False
        elif phase is Phase.DATA:
            if step < self._ledger.highest:
                # The run has gone back: an earlier attempt has taken these steps.
                self._ledger.lose_after(step)
        elif phase in (Phase.CHECKPOINT, Phase.END) and not self._is_kept:
            self._is_kept = True
            if step <= self._before:
                lose_work(self._open)
        self._phase, self._step = phase.value, step
        if self._since_ns - self._written_ns >= _WRITE_EVERY_S * 1e9:
            self._write()

    def goodput(self) -> float:
        """`accounts().goodput`, at less cost."""
        self._count()
        booked, attempt = self._ledger.totals, self._open
        useful = sum(booked[kind] for kind in USEFUL)
        if self._is_kept:
            useful += sum(attempt[kind] for kind in USEFUL)
        return useful / max(1, self._since_ns - self._first_ns)

    def accounts(self) -> Accounts:
        """Up to now; a step counts once it was committed."""
        self._count()
        return self._accounts(self._if_it_ended_now())

    def close(self) -> None:
        """Write them down for the last time."""
        self._count()
        self._write()

    def _count(self) -> None:
        """Time since the last count belongs to the phase that there was."""
        now_ns, compiled = self._clock() + self._ahead_ns, self._compiled_ns()
        elapsed = now_ns - self._since_ns
        compiling = min(elapsed, max(0, compiled - self._compiled_before))
        self._open[self._phase] += elapsed - compiling
        self._open[COMPILE] += compiling
        self._since_ns, self._compiled_before = now_ns, compiled

    def _if_it_ended_now(self) -> Counter[str]:
        """Of the attempt under way."""
        ns = Counter(self._open)
        if not self._is_kept:
            lose_work(ns)
        return ns

    def _accounts(self, attempt: Mapping[str, int]) -> Accounts:
        booked = self._ledger.totals
        return Accounts({kind: booked[kind] + attempt.get(kind, 0) for kind in KINDS})

    def _write(self) -> None:
        """The file anew, in one rename. What is under way is written as if it ended here."""
        self._written_ns = self._since_ns
        attempt = self._if_it_ended_now()
        step = max(self._step, self._ledger.highest)
        content = {
            "version": _VERSION,
            "first_start_ns": self._first_ns,
            "until_ns": self._since_ns,
            # For whoever only wants to know how it went.
            **self._accounts(attempt).values(),
            "entries": [*self._ledger.to_json(), [step, step, attempt]],
        }
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content))
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("The books of the run cannot be written: %s", error)
            self._has_failed = True


def open_books(folder: Path, *, goes_on: bool) -> Books:
    """The books in `folder`, of a run that this process began or, where `goes_on`, continues."""
    began_ns = time.time_ns() - time.monotonic_ns()
    return Books(
        folder / BOOKS,
        started_ns=time.time_ns() - round(process_age_s() * 1e9),
        goes_on=goes_on,
        # Within a process a clock that nobody sets.
        clock=lambda: began_ns + time.monotonic_ns(),
    )


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start and imports included."""
    created_s = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):
        # Linux tells when it booted in whole seconds only, and psutil has added that.
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, up_s - (created_s - psutil.boot_time()))
    return max(0.0, time.time() - created_s)


def _read(path: Path, now_ns: int) -> tuple[Ledger, int, int]:
    """The ledger, the first start and the last entry; fresh ones where the file is damaged."""
    try:
        content: Any = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(f"it has not version {_VERSION}")
        ledger = Ledger.from_json(content.get("entries"))
        first_ns, until_ns = content.get("first_start_ns"), content.get("until_ns")
        if not isinstance(first_ns, int) or not isinstance(until_ns, int):
            raise ValueError("it does not say when it begins and ends")
        if unknown := ledger.totals.keys() - set(KINDS):
            raise ValueError(f"{min(unknown)} is no kind of time")
        if ledger.totals.total() != until_ns - first_ns:
            raise ValueError("its seconds do not add up")
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is damaged, and the books begin anew: %s", path, error)
        return Ledger(), now_ns, now_ns
    return ledger, first_ns, until_ns
