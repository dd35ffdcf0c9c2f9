"""Writes down the collectives of this rank when it hangs: shortly before the watchdog ends it, or
when the launcher asks. Layer: above the launcher's flight and supervised, phases and torch_compat.

A thread waits for both, and wakes about once in `hang_timeout_s`. It needs the interpreter's lock,
so that a rank that hangs while it holds this writes stacks only (see watchdog.py).
"""

import json
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torchtitan_lite.launcher.flight import flight_file, read_flight
from torchtitan_lite.launcher.supervised import FLIGHT_SIGNAL
from torchtitan_lite.log import logger
from torchtitan_lite.phases import Phase
from torchtitan_lite.torch_compat import flight_record

_BEFORE_LIMIT = 0.9
_NEWEST = 200
"""Of the collectives that have come back."""


class FlightRecorder:
    """Listens to the phases of a rank, and writes when one lasts."""

    def __init__(self, folder: Path, rank: int, limits: Mapping[Phase, float]) -> None:
        """`limits` of phases, in seconds."""
        self._path, self._limits = flight_file(folder, rank), limits
        self._entered: tuple[Phase, int, float] | None = None
        """Phase, step, and when it has to be over."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="flight recorder", daemon=True)
        self._thread.start()

    def entered(self, phase: Phase, step: int) -> None:
        limit_s = self._limits.get(phase)
        due_s = None if limit_s is None else time.monotonic() + _BEFORE_LIMIT * limit_s
        self._entered = None if due_s is None else (phase, step, due_s)

    def close(self) -> None:
        """Wait no longer."""
        self._is_closed = True
        if self._thread.is_alive():
            signal.pthread_kill(self._thread.ident or 0, FLIGHT_SIGNAL)
            self._thread.join()

    def _wait(self) -> None:
        # So that it wakes this thread from its sleep, and ends nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
        told = None
        while not self._is_closed:
            entered = self._entered
            idle_s = min(self._limits.values()) / 4
            if entered is None or entered is told:
                sleep_s = idle_s
            else:
                sleep_s = max(0.0, entered[2] - time.monotonic())
            asked = signal.sigtimedwait({FLIGHT_SIGNAL}, sleep_s)
            if self._is_closed:
                return
            is_late = entered is not None and entered is self._entered is not told
            if asked is not None:
                self._write()
            elif is_late and entered is not None and time.monotonic() >= entered[2]:
                told = entered
                self._write()
                self._say(entered[0], entered[1])

    def _write(self) -> None:
        try:
            record = flight_record()
            entries = record.get("entries", [])
            newest = len(entries) - _NEWEST
            kept = [one for i, one in enumerate(entries) if i >= newest or not one.get("retired")]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({**record, "entries": kept}))
            part.rename(self._path)
        except Exception as error:
            # Whatever it is, the hang is worse.
            logger.warning("The flight recorder cannot be written: %s", error)

    def _say(self, phase: Phase, step: int) -> None:
        flight = read_flight(self._path)
        pending = flight.pending if flight is not None else ()
        waits = "; ".join(call.in_words for call in pending[:3]) or "no collective"
        logger.warning(
            "No progress in %s after step %d, and soon the end of this process. It waits in %s. "
            "Flight recorder: %s",
            phase.value,
            step,
            waits,
            self._path,
        )
