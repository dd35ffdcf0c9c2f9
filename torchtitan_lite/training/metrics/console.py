"""The console: a live bar on a terminal, plain lines elsewhere.

Invariant: output of other code is never garbled. While the bar is on screen, standard output,
standard error and the project's logger print above it; closing restores the streams. rich is
imported at the first step, and only for the bar.
"""

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchtitan_lite.core.durations import clock, recent_steps, time_left_s
from torchtitan_lite.core.log import is_live_terminal, logger, wrapped
from torchtitan_lite.training.metrics.record import Event, StepRecord
from torchtitan_lite.training.metrics.sink import Cadence, Sink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_NOT_SHOWN = {
    # The start, each save and the end show their content.
    *("initial_load", "resume", "saved", "start", "time_accounting"),
    # Whatever reports them has logged a line.
    *("buddy_copies_failed", "error", "quorum", "refused", "replay_differs", "rolled_back"),
    *("slow_rank", "slow_rank_ended", "step_failed"),
}
"""Events for files."""


def open_console(cadence: Cadence, *, color: bool) -> Sink:
    """Return the live bar if standard output is a terminal that can move its cursor, otherwise
    plain lines."""
    if is_live_terminal():
        return LiveBar(cadence, color=color)
    return StepLines(cadence)


class StepLines:
    """One line for each step that is due or was skipped, and for each event."""

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self._recent_step_s = recent_steps()

    def step(self, record: StepRecord) -> None:
        self._recent_step_s.append(record.step_time_s)
        if record.skipped or self._cadence.is_due(record.step):
            print(step_line(record, self._cadence.last_step, self._recent_step_s), flush=True)

    def event(self, event: Event) -> None:
        if event.name not in _NOT_SHOWN:
            print(event_line(event), flush=True)

    def close(self) -> None:
        """Do nothing: no output is pending."""


class LiveBar:
    """The same lines as `StepLines`, above a bar that moves with every step.

    The step itself draws the bar, not a thread, so it does not compete with training. `console` is
    by default rich's own: standard output.
    """

    def __init__(self, cadence: Cadence, *, color: bool, console: "Console | None" = None) -> None:
        self._cadence = cadence
        self._color = color
        self._console = console
        self._recent_step_s = recent_steps()
        self._progress: Progress | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def step(self, record: StepRecord) -> None:
        self._recent_step_s.append(record.step_time_s)
        last_step = self._cadence.last_step
        progress = self._start()
        if record.skipped or self._cadence.is_due(record.step):
            line = step_line(record, last_step, self._recent_step_s, progress.console.width)
            self._print(line)
        left = time_left_s(self._recent_step_s, last_step - record.step)
        progress.update(
            progress.task_ids[0],
            completed=record.step,
            status=f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tok/s  "
            f"{record.memory_gib:.2f} GiB  left {clock(left)}",
            refresh=True,
        )

    def event(self, event: Event) -> None:
        if event.name not in _NOT_SHOWN:
            self._print(event_line(event))

    def close(self) -> None:
        """Leave the bar on screen and restore the streams. Idempotent."""
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, flush=True)
        else:
            # Continuation lines are indented, so that each line of a record begins at the margin.
            text = wrapped(line, self._progress.console.width)
            self._progress.console.print(text, highlight=self._color, markup=False, soft_wrap=True)

    def _start(self) -> "Progress":
        """Return the bar, shown at the first call."""
        if self._progress is not None:
            return self._progress
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # None leaves the decision to rich, which honors NO_COLOR.
        console = self._console or Console(no_color=None if self._color else True)
        stdout, stderr = sys.stdout, sys.stderr
        progress = Progress(
            TextColumn("step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            auto_refresh=False,
            redirect_stderr=stderr.isatty(),
            expand=True,
        )
        progress.add_task("", total=self._cadence.last_step, status="")
        progress.start()
        # The logger's handlers have the stream objects, but rich replaces streams by name.
        for handler in logger.handlers:
            for before, now in ((stdout, sys.stdout), (stderr, sys.stderr)):
                if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                    self._redirected.append((handler, before))
                    handler.setStream(now)
                    break
        self._progress = progress
        return progress


def step_line(
    record: StepRecord,
    last_step: int,
    recent_step_s: Iterable[float],
    width: int | None = None,
) -> str:
    """Format a step in one line. The time left is estimated from the seconds of recent steps. On
    a terminal of `width` columns, parts that the live bar shows too are omitted if they do not
    fit."""
    parts = {
        "step": f"step {record.step}/{last_step}",
        "loss": f"loss {record.loss:.4f}",
        "grad_norm": f"grad_norm {record.grad_norm:.2f}",
        "lr": f"lr {record.lr:.1e}",
        "tokens": f"tok/s {record.tokens_per_second:,.0f}",
    }
    if record.mfu is not None:
        parts["mfu"] = f"mfu {record.mfu * 100:.1f} %"
    if record.router_load:
        parts["experts"] = f"busiest expert {max(record.router_load.values()):.1f}x"
    parts["memory"] = f"mem {record.memory_gib:.2f} GiB"
    parts["left"] = f"left {clock(time_left_s(recent_step_s, last_step - record.step))}"
    if record.skipped:
        parts["skipped"] = "skipped"
    for name in ("left", "memory", "tokens", "lr", "mfu", "experts", "grad_norm"):
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def event_line(event: Event) -> str:
    """Format an event in one line."""
    shown = [f"{name} {_shown(value)}" for name, value in event.values.items()]
    return "  ".join([event.name, f"step {event.step}", *shown])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        # A small number is not shown as 0.
        return f"{value:.1e}" if 0 < abs(value) < 1e-4 else f"{value:.4f}"
    # Line breaks and terminal control sequences are escaped.
    is_plain = not isinstance(value, str) or value.isprintable()
    return str(value) if is_plain else repr(value)
