"""Phase listeners that handle a hang of this rank: heartbeats for the launcher, a watchdog that
ends the process with its stacks, and a flight recorder of the pending collectives.

The watchdog's timer is faulthandler's, in a native thread that does not take the GIL: it also fires
where Python cannot run, as in compiled code that hangs. A stopped process is detected from outside,
by the launcher (supervision/failures/hang_detection.py), which has more evidence and therefore acts
first.

The flight recorder's thread waits for a request of the launcher and for the end of a phase's limit,
and wakes about once per `hang_timeout_s`. It needs the GIL, so that a rank that hangs while it
holds the GIL writes stacks only.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.phases import Phase, PhaseListener
from torchtitan_lite.core.rank.heartbeat import HEARTBEATS, HeartbeatWriter
from torchtitan_lite.core.rank.supervised import FLIGHT_SIGNAL, RANK_LOGS
from torchtitan_lite.distributed.torch_compat import flight_record
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    flight_record_file,
    read_flight_record,
)

_TIMEOUT_FACTORS = {
    Phase.DATA: 1,
    Phase.COMPUTE: 1,
    # A rank that waits for other replicas gets more time, so that the one that hangs is ended
    # first. The host also waits here for its own GPU's backward.
    Phase.COMMUNICATION: 3,
    # Slow storage or a long validation is not a hang.
    Phase.CHECKPOINT: 10,
    Phase.BETWEEN: 10,
}
"""Time limits as multiples of `hang_timeout_s`; a phase that is missing here has no limit."""
_HEAD_START_S = 30.0
"""Time for the launcher to diagnose a hang before the process ends itself."""
_WARN_FRACTION = 0.9
_KEPT_COMPLETED = 200
"""Number of completed collectives to write."""


@contextmanager
def hang_listeners(hang_timeout_s: float, rank: int, folder: Path) -> Iterator[list[PhaseListener]]:
    """Yield the phase listeners of this rank. The flight record is written to `folder`, unless a
    launcher sets another. With a `hang_timeout_s` of 0 hangs are not detected."""
    if hang_timeout_s == 0:
        yield []
        return
    heartbeat = _heartbeat_writer(rank, hang_timeout_s)
    limits, logs = phase_limits_s(hang_timeout_s), os.environ.get(RANK_LOGS)
    recorder = FlightRecorder(folder if logs is None else Path(logs), rank, limits)
    watchdog = HangWatchdog(limits, has_launcher=heartbeat is not None)
    try:
        yield [recorder, watchdog] if heartbeat is None else [recorder, watchdog, heartbeat]
    except Exception:
        # A collective may have failed because of another rank: the launcher compares the records.
        recorder.write()
        raise
    finally:
        watchdog.disarm()
        recorder.close()
        if heartbeat is not None:
            heartbeat.erase()


def _heartbeat_writer(rank: int, hang_timeout_s: float) -> HeartbeatWriter | None:
    """Return the writer of heartbeats for the launcher; None without a launcher."""
    path = os.environ.get(HEARTBEATS)
    if path is None:
        return None
    try:
        return HeartbeatWriter(path, rank, phase_limits_s(hang_timeout_s), hang_timeout_s)
    except OSError as error:
        logger.warning("This rank sends no heartbeats to the launcher: %s", error)
        return None


def phase_limits_s(hang_timeout_s: float) -> dict[Phase, float]:
    """Return the time limits of phases, in seconds. Phases without a limit are missing."""
    return {phase: times * hang_timeout_s for phase, times in _TIMEOUT_FACTORS.items()}


class HangWatchdog:
    """Phase listener that, after the time limit of a phase, writes the stacks of all threads to
    standard error and ends the process with status 1."""

    def __init__(self, limits: Mapping[Phase, float], *, has_launcher: bool) -> None:
        """`limits` are in seconds. With `has_launcher`, the launcher gets time to act first."""
        head_start_s = _HEAD_START_S if has_launcher else 0.0
        self._limits = {phase: limit_s + head_start_s for phase, limit_s in limits.items()}

    def entered(self, phase: Phase, step: int) -> None:
        limit_s = self._limits.get(phase)
        if limit_s is None:
            self.disarm()
        else:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)

    def disarm(self) -> None:
        """Cancel the timer."""
        faulthandler.cancel_dump_traceback_later()


class FlightRecorder:
    """Phase listener that writes torch's flight record shortly before the time limit of a phase."""

    def __init__(self, folder: Path, rank: int, limits: Mapping[Phase, float]) -> None:
        """`limits` are in seconds."""
        self._path, self._limits = flight_record_file(folder, rank), limits
        self._former = {_identity(entry) for entry in _recorded().get("entries", [])}
        """Collectives of former worlds of this process, whose groups had the same names."""
        self._entered: tuple[Phase, int, float] | None = None
        """Phase, step, and the time at which to write."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="flight recorder", daemon=True)
        self._thread.start()

    def entered(self, phase: Phase, step: int) -> None:
        limit_s = self._limits.get(phase)
        due_s = None if limit_s is None else time.monotonic() + _WARN_FRACTION * limit_s
        self._entered = None if due_s is None else (phase, step, due_s)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        if self._thread.is_alive():
            signal.pthread_kill(self._thread.ident or 0, FLIGHT_SIGNAL)
            self._thread.join()

    def _run(self) -> None:
        # Block the signal in this thread too, so that sigtimedwait receives it instead of the
        # default action, which ends the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
        reported = None
        while not self._is_closed:
            entered = self._entered
            idle_s = min(self._limits.values()) / 4
            if entered is None or entered is reported:
                sleep_s = idle_s
            else:
                sleep_s = max(0.0, entered[2] - time.monotonic())
            asked = signal.sigtimedwait({FLIGHT_SIGNAL}, sleep_s)
            if self._is_closed:
                return
            is_late = entered is not None and entered is self._entered is not reported
            if asked is not None:
                self.write()
            elif is_late and entered is not None and time.monotonic() >= entered[2]:
                reported = entered
                self.write()
                self._report(entered[0], entered[1])

    def write(self) -> None:
        """Write the newest collectives of this rank. Logs a failure."""
        record = _recorded()
        if not record:
            return
        entries = [
            entry for entry in record.get("entries", []) if _identity(entry) not in self._former
        ]
        newest = len(entries) - _KEPT_COMPLETED
        try:
            kept = [
                entry for i, entry in enumerate(entries) if i >= newest or not entry.get("retired")
            ]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({**record, "entries": kept}))
            part.rename(self._path)
        except Exception as error:
            # No error here may hide the hang.
            logger.warning("The flight record cannot be written: %s", error)

    def _report(self, phase: Phase, step: int) -> None:
        flight = read_flight_record(self._path)
        pending = flight.pending if flight is not None else ()
        waits = "; ".join(call.description for call in pending[:3]) or "no collective"
        logger.warning(
            "No progress in %s after step %d: this process will be ended soon. It waits in %s. "
            "Flight recorder: %s",
            phase.value,
            step,
            waits,
            self._path,
        )


def _recorded() -> dict[str, Any]:
    """Return torch's flight record; empty, with a warning, if torch fails."""
    try:
        return flight_record()
    except Exception as error:
        logger.warning("The flight record cannot be read: %s", error)
        return {}


def _identity(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what distinguishes a collective from those of former worlds."""
    keys = ("process_group", "profiling_name", "collective_seq_id", "time_created_ns")
    return tuple(str(entry.get(key)) for key in keys)
