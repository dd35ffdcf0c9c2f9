"""What people see of the replicas: a live table on a terminal, plain lines elsewhere. Layer: above
replica and lighthouse_process.

The launcher draws it; no thread does, since forks and threads do not go together.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_lite.durations import clock
from torchtitan_lite.launcher.lighthouse_process import LighthouseProcess
from torchtitan_lite.launcher.replica import Replica, State
from torchtitan_lite.log import is_live_terminal, wrapped
from torchtitan_lite.outputs import LAUNCHER_STARTED

if TYPE_CHECKING:
    from rich.table import Table

_LIVE_S = 0.25
_PLAIN_S = 5.0
_OTHER_COLUMNS_WIDTH = 80
_EVENTS_WIDTH = 110
"""Columns from which on the table has one for events."""
_STYLES = {
    State.TRAINING: "green",
    State.FINISHED: "green",
    State.HEALING: "yellow",
    State.REFORMING: "yellow",
    State.ENDING: "red",
    State.RESTARTING: "red",
    State.GIVEN_UP: "bold red",
}


class View(Protocol):
    """Someone who is told."""

    def say(self, event: str) -> None:
        """Something has happened."""
        ...

    def show(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        """Show how things stand, when it is time again. Called all the time."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def open_view() -> View:
    """The table when standard output is a terminal that can move its cursor, else lines."""
    if is_live_terminal():
        return LiveTable()
    return PlainLines()


class PlainLines:
    """A line for each event, and one for all replicas every few seconds while steps are taken."""

    def __init__(self) -> None:
        self._shown, self._due_s = "", 0.0

    def say(self, event: str) -> None:
        print(time.strftime("%H:%M:%S"), event, flush=True)

    def show(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        # Else nothing has changed that was not said as an event.
        if not any(one.state is State.TRAINING for one in replicas):
            return
        line = "; ".join(f"replica {one.number}: {in_words(one)}" for one in replicas)
        if line != self._shown:
            self._shown, self._due_s = line, now_s + _PLAIN_S
            self.say(line)

    def close(self) -> None:
        """Nothing is pending."""


class LiveTable:
    """A table that is drawn over itself, with the events above it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False, transient=False)
        self._live.start()
        self._due_s = 0.0

    def say(self, event: str) -> None:
        line = wrapped(f"{time.strftime('%H:%M:%S')} {event}", self._live.console.width)
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._due_s = 0.0

    def show(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LIVE_S
            self._live.update(
                table(replicas, lighthouse, now_s, self._live.console.width), refresh=True
            )

    def close(self) -> None:
        self._live.stop()


class RecordedView:
    """Another view, whose events are appended to a file as JSON lines too.

    The report of a run draws its faults and recoveries from this file. A file that cannot be
    written is reported once and changes nothing else.
    """

    def __init__(self, view: View, path: Path) -> None:
        self._view, self._path = view, path
        self._has_failed = False
        self._record(LAUNCHER_STARTED)

    def say(self, event: str) -> None:
        self._view.say(event)
        self._record(event)

    def show(self, replicas: Sequence[Replica], lighthouse: LighthouseProcess) -> None:
        self._view.show(replicas, lighthouse)

    def close(self) -> None:
        self._view.close()

    def _record(self, event: str) -> None:
        line = json.dumps({"time": time.time(), "text": event})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._view.say(f"events are not recorded: {error}")


def table(
    replicas: Sequence[Replica], lighthouse: LighthouseProcess, now_s: float, width: int
) -> "Table":
    """A row for each replica and one for the lighthouse, for a terminal of `width` columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    made.add_column("", no_wrap=True)
    made.add_column("state", no_wrap=True)
    for heading in ("step", "loss", "tokens/s", "left", "restarts"):
        made.add_column(heading, justify="right", no_wrap=True)
    # A narrow terminal has no room for it: the same text stands above the table.
    has_events = width >= _EVENTS_WIDTH
    if has_events:
        room = width - _OTHER_COLUMNS_WIDTH
        made.add_column("last event", overflow="ellipsis", no_wrap=True, max_width=room)
    for one in replicas:
        state = Text(_state(one, now_s), style=_STYLES.get(one.state, ""))
        step, loss, rate, _ = _numbers(one)
        made.add_row(
            f"replica {one.number}",
            state,
            step,
            loss,
            rate,
            _left(one),
            str(one.num_restarts),
            *([Text(one.last_event)] if has_events else []),
        )
    up = lighthouse.is_listening
    state = Text("listening" if up else "down", style="green" if up else "red")
    where = [Text(lighthouse.address or "")] if has_events else []
    made.add_row("lighthouse", state, "", "", "", "", str(lighthouse.num_restarts), *where)
    return made


def in_words(replica: Replica) -> str:
    """The state of a replica and its newest step, for a line."""
    if replica.state is not State.TRAINING or _record(replica) is None:
        return _state(replica, time.monotonic())
    step, loss, rate, count = _numbers(replica)
    left = f" left {left}" if (left := _left(replica)) else ""
    return f"step {step} loss {loss} {rate} tokens/s {count} replicas{left}"


def _state(replica: Replica, now_s: float) -> str:
    if replica.state is State.RESTARTING:
        return f"restarting in {replica.restarts_in_s(now_s):.0f} s"
    if replica.state is State.STARTING and replica.progress is not None:
        return replica.progress.stage
    return replica.state.value


def _left(replica: Replica) -> str:
    """The estimated time until the last step; empty where it is not known."""
    progress = replica.progress
    left_s = None if progress is None else progress.time_left_s
    return "" if left_s is None or replica.is_over else clock(left_s)


def _record(replica: Replica) -> Any:
    return None if replica.progress is None else replica.progress.record


def _numbers(replica: Replica) -> tuple[str, str, str, str]:
    """Step, loss, tokens per second and replicas; empty where there are none."""
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
