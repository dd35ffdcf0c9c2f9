"""The timeline of a run: generations of each replica, and events over time. Pure."""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.core.outputs import LAUNCHER_STARTED
from torchtitan_lite.tools.report.run_files import RunEvent, RunFiles, Stream

KINDS = {
    "fault": "fault",
    "error": "error that ended the run",
    "machine_fault": "machine fault",
    "hang": "hang",
    "aborted": "aborted step",
    "skipped": "skipped step",
    "rolled_back": "rollback",
    "save_failed": "save failed",
    "slow_rank": "slow rank",
    "restart": "restart",
    "resume": "resumed from checkpoint",
    "healed": "healed",
    "quorum": "quorum changed",
    "saved": "checkpoint saved",
    "validation": "validation",
    "averaged": "replicas averaged",
    "other": "other event",
}
"""Kinds of marks, the most important first, with their display names."""
ROUTINE = frozenset({"saved", "validation", "averaged", "quorum"})
"""Kinds that also occur in a run without faults."""
_KIND_OF_EVENT = {
    "error": "error",
    "replay_differs": "machine_fault",
    "step_failed": "aborted",
    "refused": "skipped",
    "rolled_back": "rolled_back",
    "saves_failed": "save_failed",
    "slow_rank": "slow_rank",
    "slow_rank_ended": "slow_rank",
    "resume": "resume",
    "healed": "healed",
    "quorum": "quorum",
    "saved": "saved",
    "validation": "validation",
    "averaged": "averaged",
}
_NOT_SHOWN = frozenset({"time_accounting", "sample", "samples", "start", "books"})
"""`books` is the former name of `time_accounting`."""
_LAUNCHER_KINDS = {"failed": "fault", "given up": "fault", "makes no progress": "hang"}
"""Kinds by prefix of the launcher's text."""
_EXPECTED = (LAUNCHER_STARTED, "lighthouse: listening")
"""Prefixes of the launcher's texts that occur in every run."""
_MAX_TEXT_LENGTH = 300
_MAX_MARKS = 1000
"""Maximum marks per kind; beyond it they are thinned out evenly."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at one point in time."""

    kind: str
    """One of KINDS."""
    lane: str
    time: float | None
    """Unix time, in seconds."""
    step: int | None
    """Last completed step."""
    text: str


@dataclass(frozen=True)
class GenerationSpan:
    """A period of a replica: "starting", "training" or "down"."""

    kind: str
    lane: str
    start: float
    end: float
    """Unix times, in seconds."""
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A failure of a replica, and its recovery."""

    replica: int
    reason: str
    time: float
    failed_after: int | None
    """Last step of the replica before the failure."""
    seconds: float | None
    """Seconds until its next step began; None if it ran none."""
    resumed_at: int | None
    """The first step after the recovery."""


@dataclass(frozen=True, kw_only=True)
class RunTimeline:
    """Marks, spans and recoveries of one run."""

    lanes: tuple[str, ...]
    marks: tuple[Mark, ...]
    spans: tuple[GenerationSpan, ...]
    recoveries: tuple[Recovery, ...]
    first_time: float | None
    """Earliest time of all marks and spans; None if the records have no times (files of earlier
    versions)."""
    num_thinned: int
    """Number of marks omitted from `marks`, because there are too many of their kind."""


def timeline(run: RunFiles) -> RunTimeline:
    """Return the timeline of `run`."""
    spans = [span for stream in run.leaders for span in _spans(stream, run.launcher_events)]
    marks = [mark for stream in run.leaders for mark in _marks(stream)]
    marks += _launcher_marks(run)
    marks.sort(key=lambda mark: (mark.time or 0.0, mark.step or 0))
    kept = _downsample(marks)
    named = {item.lane for item in (*kept, *spans)} | {stream.label for stream in run.streams}
    times = [span.start for span in spans] + [mark.time for mark in marks if mark.time is not None]
    return RunTimeline(
        lanes=tuple(sorted(named, key=_lane_order)),
        marks=tuple(kept),
        spans=tuple(spans),
        recoveries=tuple(_recoveries(run)),
        first_time=min(times, default=None),
        num_thinned=len(marks) - len(kept),
    )


def format_values(values: Mapping[str, Any]) -> str:
    """Format the values of an event as one line of limited length."""
    parts = []
    for name, value in values.items():
        if isinstance(value, float):
            shown = f"{value:.6g}"
        elif isinstance(value, str):
            shown = value
        else:
            shown = json.dumps(value)
        parts.append(f"{name.replace('_', ' ')} {shown}")
    text = " ".join(", ".join(parts).split())
    return text if len(text) <= _MAX_TEXT_LENGTH else text[: _MAX_TEXT_LENGTH - 3] + "..."


def _marks(stream: Stream) -> Iterator[Mark]:
    has_skips = False
    num_starts = 0
    for event in stream.events:
        kind, lane = _KIND_OF_EVENT.get(event.name, "other"), stream.label
        text = format_values(event.values)
        time = event.time
        has_skips = has_skips or event.name == "refused"
        if event.name == "start":
            num_starts += 1
            if num_starts == 1:
                continue
            kind, text = "restart", f"process {num_starts} started"
            time = _process_start(event)
        elif event.name in _NOT_SHOWN:
            continue
        elif kind == "other":
            text = f"{event.name}: {text}"
        elif kind == "slow_rank":
            lane = _lane_of_rank(event, stream)
            text = f"{'ended: ' if event.name == 'slow_rank_ended' else ''}{text}"
        yield Mark(kind=kind, lane=lane, time=time, step=event.step, text=text)
    if not has_skips:
        for step in stream.steps:
            if step.skipped:
                text = f"step {step.step} was skipped"
                yield Mark(
                    kind="skipped", lane=stream.label, time=step["time"], step=step.step, text=text
                )


def _process_start(event: RunEvent) -> float | None:
    """Return when the process that wrote a `start` event began."""
    age_s = event.values.get("process_age_s", 0.0)
    if event.time is None or isinstance(age_s, bool) or not isinstance(age_s, int | float):
        return event.time
    return min(event.time, max(0.0, event.time - age_s))


def _lane_of_rank(event: RunEvent, stream: Stream) -> str:
    """Return the lane of the rank that an event of the leader names."""
    replica, rank = event.values.get("replica"), event.values.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool):
        return stream.label
    replica_number = None if stream.replica is None or not isinstance(replica, int) else replica
    return Stream(replica=replica_number, rank=rank, steps=(), events=()).label


def _launcher_marks(run: RunFiles) -> Iterator[Mark]:
    streams = {stream.replica: stream for stream in run.leaders}
    for event in run.launcher_events:
        text, replica = event.values["text"], event.values["replica"]
        kind = next((k for start, k in _LAUNCHER_KINDS.items() if text.startswith(start)), None)
        if kind is not None and replica is not None:
            step = _last_step(streams.get(replica), event.time)
            lane = f"replica {replica}"
        elif replica is None and not text.startswith(_EXPECTED):
            kind, lane, step = "other", "launcher", None
        else:
            continue
        yield Mark(kind=kind, lane=lane, time=event.time, step=step, text=_one_line(text))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT_LENGTH else line[: _MAX_TEXT_LENGTH - 3] + "..."


def _last_step(stream: Stream | None, time: float | None) -> int | None:
    """Return the last step that a replica had run at `time`."""
    if stream is None or time is None:
        return None
    place = bisect_right(stream.timed, time, key=lambda entry: entry[0])
    return stream.timed[place - 1][2] if place else None


def _spans(stream: Stream, launcher_events: Sequence[RunEvent]) -> Iterator[GenerationSpan]:
    """Yield the generations of a replica: its start, its steps, and the time until the next
    generation."""
    steps, lane = stream.timed, stream.label
    ends = [end for end, _, _ in steps]
    failures = _launcher_times(stream, launcher_events, "failed")
    starts = _generation_starts(stream, launcher_events)
    for place, start in enumerate(starts):
        following = starts[place + 1] if place + 1 < len(starts) else math.inf
        own = steps[bisect_left(ends, start) : bisect_left(ends, following)]
        stops = [failure for failure in failures if start <= failure < following][:1]
        stops += [own[-1][0]] if own else []
        # A generation without steps and failures is still starting, or was replaced.
        end = max(stops) if stops else (start if math.isinf(following) else following)
        begin = max(start, own[0][1]) if own else end
        first, last = (own[0][2], own[-1][2]) if own else (0, 0)
        if begin > start:
            yield GenerationSpan("starting", lane, start, begin, first, first)
        if own:
            yield GenerationSpan("training", lane, begin, end, first, last)
        if end < following < math.inf:
            yield GenerationSpan("down", lane, end, following, last, last)


def _generation_starts(stream: Stream, launcher_events: Sequence[RunEvent]) -> list[float]:
    """Return when each generation began, as recorded by the launcher or the process itself."""
    starts = _launcher_times(stream, launcher_events, "started")
    ends = [end for end, _, _ in stream.timed]
    for event in stream.events:
        began = _process_start(event)
        if event.name != "start" or began is None:
            continue
        before = [start for start in starts if start <= began]
        # The launcher records the same start slightly earlier, with no step in between.
        if not before or bisect_left(ends, began) != bisect_left(ends, max(before)):
            starts.append(began)
    if not starts and stream.timed:
        starts = [stream.timed[0][1]]
    return sorted(starts)


def _launcher_times(
    stream: Stream, launcher_events: Sequence[RunEvent], beginning: str
) -> list[float]:
    """Return when the launcher recorded texts with that prefix about a replica."""
    return [
        event.time
        for event in launcher_events
        if event.time is not None
        and event.values["replica"] == stream.replica
        and event.values["text"].startswith(beginning)
    ]


def _recoveries(run: RunFiles) -> Iterator[Recovery]:
    streams = {stream.replica: stream for stream in run.leaders}
    for event in run.launcher_events:
        replica, text, time = event.values["replica"], event.values["text"], event.time
        if replica is None or time is None or not text.startswith("failed"):
            continue
        stream = streams.get(replica)
        steps = [] if stream is None else stream.timed
        place = bisect_right(steps, time, key=lambda entry: entry[0])
        begun = steps[place][1:] if place < len(steps) else None
        yield Recovery(
            replica=replica,
            reason=_one_line(text.removeprefix("failed, ")),
            time=time,
            failed_after=_last_step(stream, time),
            seconds=None if begun is None else max(0.0, begun[0] - time),
            resumed_at=None if begun is None else begun[1],
        )


def _downsample(marks: Sequence[Mark]) -> list[Mark]:
    by_kind: dict[str, int] = {}
    for mark in marks:
        by_kind[mark.kind] = by_kind.get(mark.kind, 0) + 1
    strides = {kind: -(-count // _MAX_MARKS) for kind, count in by_kind.items()}
    seen: dict[str, int] = {}
    kept = []
    for mark in marks:
        place = seen[mark.kind] = seen.get(mark.kind, -1) + 1
        if place % strides[mark.kind] == 0:
            kept.append(mark)
    return kept


def _lane_order(lane: str) -> tuple[bool, list[int]]:
    """Return the sort key: replicas and their ranks by number, the launcher last."""
    numbers = [int(word.strip(",")) for word in lane.split() if word.strip(",").isdigit()]
    return lane == "launcher", numbers
