"""Status display of the launcher: a live table on a terminal, plain lines elsewhere.

The launcher's loop draws it, because a drawing thread is incompatible with forks.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_lite.core.diagnosis import LAUNCHER_FILE, Diagnosis
from torchtitan_lite.core.durations import clock
from torchtitan_lite.core.log import is_live_terminal, wrapped
from torchtitan_lite.core.output_files import OutputFaults, RecordFile
from torchtitan_lite.core.outputs import LAUNCHER_STARTED
from torchtitan_lite.fault_tolerance.supervision.launcher.lighthouse_process import (
    LighthouseProcess,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import Replica, ReplicaState

if TYPE_CHECKING:
    from rich.table import Table

_LIVE_S = 0.25
_PLAIN_S = 5.0
_OTHER_COLUMNS_WIDTH = 100
_NARROW_WIDTH = 100
"""Terminals below this width do not show restarts, and one process per replica."""
_EVENTS_WIDTH = 120
"""Minimum width of a terminal for the column of events."""
_STYLES = {
    ReplicaState.TRAINING: "green",
    ReplicaState.FINISHED: "green",
    ReplicaState.HEALING: "yellow",
    ReplicaState.RESIZING: "yellow",
    ReplicaState.ENDING: "red",
    ReplicaState.RESTARTING: "red",
    ReplicaState.GIVEN_UP: "bold red",
}
_LIGHTHOUSE_STYLES = {"listening": "green", "down": "red", "given up": "bold red"}


class StatusView(Protocol):
    """Display of the launcher's events and of the state of the replicas."""

    def report_event(self, event: str) -> None:
        """Display an event."""
        ...

    def report_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Display a diagnosis."""
        ...

    def update(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        """Display the current state if it is time. Called on every iteration of the launcher's
        loop."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


def open_view() -> StatusView:
    """Return a table if standard output is a terminal that can move its cursor, else plain
    lines."""
    if is_live_terminal():
        return LiveTable()
    return PlainLines()


class PlainLines:
    """Display that prints a line per event and, while steps are taken, a line for all replicas
    every few seconds."""

    def __init__(self) -> None:
        self._shown, self._due_s = "", 0.0

    def report_event(self, event: str) -> None:
        print(time.strftime("%H:%M:%S"), event, flush=True)

    def report_diagnosis(self, diagnosis: Diagnosis) -> None:
        self.report_event(str(diagnosis))

    def update(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        # All other changes are printed as events.
        if not any(replica.state is ReplicaState.TRAINING for replica in replicas):
            return
        line = "; ".join(f"replica {replica.number}: {describe(replica)}" for replica in replicas)
        if line != self._shown:
            self._shown, self._due_s = line, now_s + _PLAIN_S
            self.report_event(line)

    def close(self) -> None:
        """Do nothing: no output is pending."""


class LiveTable:
    """Display that redraws a table in place, with the events above it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False, transient=False)
        self._live.start()
        self._due_s = 0.0
        self._shown: tuple[Sequence[Replica], LighthouseProcess] | None = None

    def report_event(self, event: str) -> None:
        line = wrapped(f"{time.strftime('%H:%M:%S')} {event}", self._live.console.width)
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._due_s = 0.0

    def report_diagnosis(self, diagnosis: Diagnosis) -> None:
        self.report_event(str(diagnosis))

    def update(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        self._shown = replicas, lighthouse
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LIVE_S
            self._draw(now_s)

    def close(self) -> None:
        # The table stays on screen: with the end of all processes.
        self._draw(time.monotonic())
        self._live.stop()

    def _draw(self, now_s: float) -> None:
        if self._shown is not None:
            table = status_table(*self._shown, now_s, self._live.console.width)
            self._live.update(table, refresh=True)


class RecordedView:
    """Wrapper that also appends the events of another view to a JSON Lines file, and its diagnoses
    to another one beside it.

    The report of a run reads faults and recoveries from the first. If they cannot be written,
    records wait in memory.
    """

    def __init__(self, view: StatusView, path: Path) -> None:
        self._view = view
        faults = OutputFaults(view.report_event)
        self._file = RecordFile(path, faults)
        self._diagnoses = RecordFile(path.with_name(LAUNCHER_FILE), faults)
        self._record(LAUNCHER_STARTED)

    def report_event(self, event: str) -> None:
        self._view.report_event(event)
        self._record(event)

    def report_diagnosis(self, diagnosis: Diagnosis) -> None:
        self.report_event(str(diagnosis))
        self._diagnoses.append(diagnosis.to_json())

    def update(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        self._view.update(replicas, lighthouse)

    def close(self) -> None:
        self._view.close()
        self._file.close()
        self._diagnoses.close()

    def _record(self, event: str) -> None:
        line = json.dumps({"time": time.time(), "text": event})
        self._file.append(line.encode() + b"\n")


def status_table(
    replicas: Sequence[Replica], lighthouse: LighthouseProcess, now_s: float, width: int
) -> "Table":
    """Return a table with a row per replica and one for the lighthouse, for a terminal of `width`
    columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    made.add_column("", no_wrap=True)
    made.add_column("state", no_wrap=True)
    # A narrow terminal has no room for all columns: the same text stands above the table.
    is_narrow, has_events = width < _NARROW_WIDTH, width >= _EVENTS_WIDTH
    made.add_column("process", no_wrap=True)
    headings = ("step", "loss", "tokens/s", "left", "restarts")
    for heading in headings[:-1] if is_narrow else headings:
        made.add_column(heading, justify="right", no_wrap=True)
    if has_events:
        room = width - _OTHER_COLUMNS_WIDTH
        made.add_column("last event", overflow="ellipsis", no_wrap=True, max_width=room)
    for replica in replicas:
        state = Text(_state(replica, now_s), style=_STYLES.get(replica.state, ""))
        step, loss, rate, _ = _numbers(replica)
        made.add_row(
            f"replica {replica.number}",
            state,
            _processes(replica.rank_pids, is_narrow=is_narrow),
            step,
            loss,
            rate,
            _left(replica),
            *([] if is_narrow else [str(replica.num_restarts)]),
            *([Text(replica.last_event)] if has_events else []),
        )
    state = Text(lighthouse.state, style=_LIGHTHOUSE_STYLES.get(lighthouse.state, ""))
    where = [Text(lighthouse.address or "")] if has_events else []
    pid = "" if lighthouse.pid is None else str(lighthouse.pid)
    restarts = [] if is_narrow else [str(lighthouse.num_restarts)]
    made.add_row("lighthouse", state, pid, "", "", "", "", *restarts, *where)
    return made


def _processes(rank_pids: Mapping[int, int], *, is_narrow: bool) -> str:
    """Return the process id of the first rank, and the number of further ones."""
    if not rank_pids:
        return ""
    more = "" if is_narrow or len(rank_pids) == 1 else f" +{len(rank_pids) - 1}"
    return f"{rank_pids[min(rank_pids)]}{more}"


def describe(replica: Replica) -> str:
    """Describe the state of a replica and its newest step in one line."""
    if replica.state is not ReplicaState.TRAINING or _record(replica) is None:
        return _state(replica, time.monotonic())
    step, loss, rate, count = _numbers(replica)
    left = f" left {left}" if (left := _left(replica)) else ""
    return f"step {step} loss {loss} {rate} tokens/s {count} replicas{left}"


def _state(replica: Replica, now_s: float) -> str:
    if replica.state is ReplicaState.RESTARTING:
        return f"restarting in {replica.restarts_in_s(now_s):.0f} s"
    if replica.state is ReplicaState.STARTING and replica.progress is not None:
        return replica.progress.stage
    return replica.state.value


def _left(replica: Replica) -> str:
    """Return the estimated time until the last step; empty if unknown."""
    progress = replica.progress
    left_s = None if progress is None else progress.time_left_s
    return "" if left_s is None or replica.is_over else clock(left_s)


def _record(replica: Replica) -> Any:
    return None if replica.progress is None else replica.progress.last_step


def _numbers(replica: Replica) -> tuple[str, str, str, str]:
    """Return step, loss, tokens per second and number of replicas, each empty if unknown."""
    record, progress = _record(replica), replica.progress
    if record is None or progress is None:
        return "", "", "", ""

    def number(key: str, form: str) -> str:
        value = record.get(key)
        return "" if value is None else format(value, form)

    return (
        number("step", "d") + (f"/{progress.total_steps}" if progress.total_steps else ""),
        number("loss", ".4f"),
        number("tokens_per_second", ",.0f"),
        number("num_replicas", "d"),
    )
