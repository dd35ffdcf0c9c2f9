"""The timeline of a run: attempts of each replica, and what happened when. Pure. Layer: above
run_files."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.report.run_files import RunEvent, RunFiles, Stream

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
"""Kinds of marks, the most important first, with their names for the legend."""
ROUTINE = frozenset({"saved", "validation", "averaged", "quorum"})
"""Kinds that a run without any fault has too."""
_OF_EVENT = {
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
_NOT_SHOWN = frozenset({"books", "goodput", "sample", "samples", "start"})
_LAUNCHER_KINDS = {"failed": "fault", "given up": "fault", "makes no progress": "hang"}
"""By the beginning of the launcher's text."""
_LONGEST_TEXT = 300
_MOST_MARKS = 1000
"""Of one kind; beyond it they are thinned out evenly."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at one moment."""

    kind: str
    """One of KINDS."""
    lane: str
    time: float | None
    """Unix time, in seconds."""
    step: int | None
    """Last step that had ended."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a replica did for a while: "starting", "training" or "down"."""

    kind: str
    lane: str
    start: float
    end: float
    """Unix times, in seconds."""
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A failure of a replica, and its return."""

    replica: int
    reason: str
    time: float
    failed_after: int | None
    """Last step of the replica before the failure."""
    seconds: float | None
    """Until its next step began; None if it took none."""
    resumed_at: int | None
    """That step."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything of one run."""

    lanes: tuple[str, ...]
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...]
    recoveries: tuple[Recovery, ...]
    first_time: float | None
    """Of all marks and spans; None if the records have no times (files of earlier versions)."""
    num_thinned: int
    """Marks that are not in `marks`, because there are too many of their kind."""


def timeline(run: RunFiles) -> Timeline:
    """The timeline of `run`."""
    spans = [span for stream in run.leaders for span in _spans(stream, run.launcher_events)]
    marks = [mark for stream in run.leaders for mark in _marks(stream)]
    marks += _launcher_marks(run)
    marks.sort(key=lambda one: (one.time or 0.0, one.step or 0))
    kept = _thinned(marks)
    named = {one.lane for one in (*kept, *spans)} | {stream.label for stream in run.streams}
    times = [one.start for one in spans] + [one.time for one in marks if one.time is not None]
    return Timeline(
        lanes=tuple(sorted(named, key=_lane_order)),
        marks=tuple(kept),
        spans=tuple(spans),
        recoveries=tuple(_recoveries(run)),
        first_time=min(times, default=None),
        num_thinned=len(marks) - len(kept),
    )


def described(values: Mapping[str, Any]) -> str:
    """The values of an event as one line of limited length."""
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
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def _marks(stream: Stream) -> Iterator[Mark]:
    has_refusals = False
    num_starts = 0
    for event in stream.events:
        kind, text, lane = _OF_EVENT.get(event.name, "other"), described(event.values), stream.label
        time = event.time
        has_refusals = has_refusals or event.name == "refused"
        if event.name == "start":
            num_starts += 1
            if num_starts == 1:
                continue
            kind, text = "restart", f"process {num_starts} begins"
            time = _process_start(event)
        elif event.name in _NOT_SHOWN:
            continue
        elif kind == "other":
            text = f"{event.name}: {text}"
        elif kind == "slow_rank":
            lane = _lane_of_rank(event, stream)
            text = f"{'ended: ' if event.name == 'slow_rank_ended' else ''}{text}"
        yield Mark(kind=kind, lane=lane, time=time, step=event.step, text=text)
    if not has_refusals:
        for one in stream.steps:
            if one.skipped:
                text = f"step {one.step} was skipped"
                yield Mark(
                    kind="skipped", lane=stream.label, time=one["time"], step=one.step, text=text
                )


def _process_start(event: RunEvent) -> float | None:
    """When the process began that wrote a `start` event."""
    age_s = event.values.get("process_age_s", 0.0)
    if event.time is None or isinstance(age_s, bool) or not isinstance(age_s, int | float):
        return event.time
    return min(event.time, max(0.0, event.time - age_s))


def _lane_of_rank(event: RunEvent, stream: Stream) -> str:
    """The lane of the rank that an event of the leader names."""
    replica, rank = event.values.get("replica"), event.values.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool):
        return stream.label
    number = None if stream.replica is None or not isinstance(replica, int) else replica
    return Stream(replica=number, rank=rank, steps=(), events=()).label


def _launcher_marks(run: RunFiles) -> Iterator[Mark]:
    streams = {stream.replica: stream for stream in run.leaders}
    for event in run.launcher_events:
        text, replica = event.values["text"], event.values["replica"]
        kind = next((k for start, k in _LAUNCHER_KINDS.items() if text.startswith(start)), None)
        if kind is not None and replica is not None:
            step = _last_step(streams.get(replica), event.time)
            lane = f"replica {replica}"
        elif replica is None and not text.startswith("lighthouse: listening"):
            kind, lane, step = "other", "launcher", None
        else:
            continue
        yield Mark(kind=kind, lane=lane, time=event.time, step=step, text=_one_line(text))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 3] + "..."


def _last_step(stream: Stream | None, time: float | None) -> int | None:
    """The last step that a replica had taken at `time`."""
    if stream is None or time is None:
        return None
    steps = [one for one in stream.steps if one["time"] is not None and one["time"] <= time]
    return max(steps, key=lambda one: one["time"] or 0.0).step if steps else None


def _spans(stream: Stream, launcher_events: Sequence[RunEvent]) -> Iterator[Span]:
    """Attempts of a replica: its start, its steps, and the time until the next attempt."""
    taken = [
        (one["time"], one["time"] - min(one["step_time_s"] or 0.0, one["time"]), one.step)
        for one in stream.steps
        if one["time"] is not None
    ]
    taken.sort()
    ends = [time for time, _, _ in taken]
    launched = sorted(
        event.time
        for event in launcher_events
        if event.time is not None
        and event.values["replica"] == stream.replica
        and event.values["text"].startswith("started")
    )
    starts = list(launched)
    for event in stream.events:
        began = _process_start(event)
        if event.name == "start" and began is not None:
            before = max((one for one in starts if one <= began), default=None)
            # The launcher's start of the same attempt is a little earlier.
            is_known = before is not None and bisect_right(ends, began) == bisect_right(
                ends, before
            )
            if not is_known:
                starts.append(began)
    starts.sort()
    if not starts and taken:
        starts = [taken[0][1]]
    failures = [
        event.time
        for event in launcher_events
        if event.time is not None
        and event.values["replica"] == stream.replica
        and event.values["text"].startswith("failed")
    ]
    for place, start in enumerate(starts):
        following = starts[place + 1] if place + 1 < len(starts) else None
        own = [one for one in taken if one[0] >= start and (not following or one[0] < following)]
        stop = next((one for one in failures if start <= one <= (following or one)), None)
        own_ends = [own[-1][0]] if own else []
        end = max([*own_ends, *([] if stop is None else [stop])], default=following or start)
        first, last = (own[0][2], own[-1][2]) if own else (0, 0)
        begin = max(start, own[0][1]) if own else end
        lane = stream.label
        if begin > start:
            yield Span(
                kind="starting", lane=lane, start=start, end=begin, first_step=first,
                last_step=first,
            )  # fmt: skip
        if own:
            yield Span(
                kind="training", lane=lane, start=begin, end=end, first_step=first, last_step=last
            )
        if following is not None and following > end:
            yield Span(
                kind="down", lane=lane, start=end, end=following, first_step=last, last_step=last
            )


def _recoveries(run: RunFiles) -> Iterator[Recovery]:
    streams = {stream.replica: stream for stream in run.leaders}
    for event in run.launcher_events:
        replica, text, time = event.values["replica"], event.values["text"], event.time
        if replica is None or time is None or not text.startswith("failed"):
            continue
        stream = streams.get(replica)
        later = [
            (one["time"] - min(one["step_time_s"] or 0.0, one["time"]), one.step)
            for one in (stream.steps if stream is not None else ())
            if one["time"] is not None and one["time"] > time
        ]
        begun = min(later, default=None)
        yield Recovery(
            replica=replica,
            reason=_one_line(text.removeprefix("failed, ")),
            time=time,
            failed_after=_last_step(stream, time),
            seconds=None if begun is None else max(0.0, begun[0] - time),
            resumed_at=None if begun is None else begun[1],
        )


def _thinned(marks: Sequence[Mark]) -> list[Mark]:
    by_kind: dict[str, int] = {}
    for one in marks:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + 1
    strides = {kind: -(-count // _MOST_MARKS) for kind, count in by_kind.items()}
    seen: dict[str, int] = {}
    kept = []
    for one in marks:
        place = seen[one.kind] = seen.get(one.kind, -1) + 1
        if place % strides[one.kind] == 0:
            kept.append(one)
    return kept


def _lane_order(lane: str) -> tuple[bool, list[int]]:
    """Replicas and their ranks by number, the launcher last."""
    numbers = [int(word.strip(",")) for word in lane.split() if word.strip(",").isdigit()]
    return lane == "launcher", numbers
