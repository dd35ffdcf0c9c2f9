"""The files of a run: metrics of each replica and rank, goodput, launcher events, config.

Invariant: whatever the files contain, each returned value has the declared type of its field. A
line that is not a valid record is skipped and listed in `problems`, with its file and number.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.outputs import (
    EARLIER_GOODPUT_FILE,
    GOODPUT_FILE,
    LAUNCH_EVENTS,
    LAUNCH_LOGS,
    LAUNCHER_STARTED,
    METRICS,
)
from torchtitan_lite.tools.report.json_lines import (
    Problems,
    cleaned,
    encodable,
    json_lines,
    number_of,
    reject_constant,
    shortened,
)

NUMBERS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "step_time_s",
    "data_time_s",
    "checkpoint_stall_s",
    "num_replicas",
    "goodput",
    "idle_experts",
    "time",
)
"""Fields of a step that the report reads. A missing one is None, so that files of earlier
versions remain readable."""
_CONFIG = "config.toml"
_REPLICA = re.compile(r"replica_(\d{1,9})")
_RANK_METRICS = re.compile(r"metrics_rank_(\d{1,9})\.jsonl")
_LAUNCHED_REPLICA = re.compile(r"replica (\d{1,9}): (.*)", re.DOTALL)
_LARGEST_STEP = 2**53
_LATEST_TIME = 253_402_300_800
"""The year 10000, which `datetime` cannot represent."""


@dataclass(frozen=True)
class Step:
    """One record of a step. None: missing, or not finite."""

    step: int
    skipped: bool
    values: Mapping[str, float | None]
    """Values by name, all of NUMBERS."""
    router_load: Mapping[str, float]

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]


@dataclass(frozen=True)
class RunEvent:
    """One event of the metrics stream or of the launcher."""

    name: str
    step: int | None
    """Last completed step; None for events of the launcher."""
    time: float | None
    """Unix time, in seconds."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The records of one metrics file."""

    replica: int | None
    """None for a run without replicas."""
    rank: int | None
    """None for the leader."""
    steps: Sequence[Step]
    events: Sequence[RunEvent]

    @property
    def label(self) -> str:
        """Return a label such as "replica 1, rank 3"; "leader" for the only stream of a run
        without replicas."""
        parts = [] if self.replica is None else [f"replica {self.replica}"]
        parts += [] if self.rank is None else [f"rank {self.rank}"]
        return ", ".join(parts) or "leader"

    @cached_property
    def timed(self) -> list[tuple[float, float, int]]:
        """End and start (Unix times, in seconds) and number of each step whose time is known,
        ascending."""
        times = []
        for step in self.steps:
            end = step["time"]
            if end is not None:
                times.append((end, max(0.0, end - (step["step_time_s"] or 0.0)), step.step))
        return sorted(times)

    def committed(self) -> list[Step]:
        """Return the committed steps that were not rolled back, ascending; of a step that was
        run twice, the last record."""
        newest = {step.step: step for step in self.steps if not step.skipped}
        return [newest[step] for step in sorted(newest)]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Time accounting of one replica."""

    replica: int | None
    goodput: float
    """Fraction of useful time, 0 to 1."""
    wall_s: float
    seconds: Mapping[str, float]
    """Seconds by kind of time."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """All records and settings of one run."""

    folder: Path
    label: str
    streams: Sequence[Stream]
    """Leaders first, by replica; then other ranks."""
    goodput: Sequence[Goodput]
    launcher_events: Sequence[RunEvent]
    """Their `values` are `replica` (None: the launcher or the lighthouse) and `text`."""
    config: Mapping[str, Any]
    config_text: str
    problems: Sequence[str]
    merged: Sequence[Step] = field(init=False)
    """The committed steps of all replicas: for each step, the record of the first replica that
    has it."""

    def __post_init__(self) -> None:
        by_step: dict[int, Step] = {}
        for stream in self.leaders:
            for record in stream.committed():
                by_step.setdefault(record.step, record)
        object.__setattr__(self, "merged", [by_step[step] for step in sorted(by_step)])

    @property
    def leaders(self) -> list[Stream]:
        """Return one stream per replica."""
        return [stream for stream in self.streams if stream.rank is None]

    @cached_property
    def tokens(self) -> dict[int, float]:
        """Return the tokens since the start of training at the end of each committed step."""
        return {
            record.step: tokens
            for record in self.merged
            if (tokens := record["tokens"]) is not None
        }

    @cached_property
    def elapsed_s(self) -> dict[int, float]:
        """Return the seconds from the begin of the first step to the end of each committed step,
        pauses between generations included."""
        ends = [(record, end) for record in self.merged if (end := record["time"]) is not None]
        start = min((end - (record["step_time_s"] or 0.0) for record, end in ends), default=0.0)
        return {record.step: end - start for record, end in ends}

    def known(self, name: str) -> list[float]:
        """Return the values of a field in all committed steps that have one."""
        return [value for record in self.merged if (value := record[name]) is not None]

    def events(self, name: str) -> list[RunEvent]:
        """Return all events of that name, by leader."""
        return [event for stream in self.leaders for event in stream.events if event.name == name]

    def setting(self, table: str, key: str) -> Any:
        """Return a value of the resolved config; None if it is missing."""
        section = self.config.get(table)
        return section.get(key) if isinstance(section, dict) else None


def read_run(folder: Path) -> RunFiles:
    """Read the dump folder of a run. Raises UserError if it has no metrics or is not readable."""
    try:
        return _run_files(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}") from error


def _run_files(folder: Path) -> RunFiles:
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {kind}. RUN must be the dump folder of a run (job.dump_folder).")
    problems = Problems()
    replicas = sorted((replica, path) for replica, path in _replica_folders(folder))
    places = [(None, folder), *replicas]
    streams = [stream for replica, path in places for stream in _streams(path, replica, problems)]
    if not any(stream.steps or stream.events for stream in streams):
        problem = "have no valid record" if streams else "do not exist"
        raise UserError(
            f"{folder} is not the dump folder of a run with steps: {METRICS} and "
            f"replica_NNN/{METRICS} {problem}.{problems.first()}"
        )
    config_text, config = _config([path for _, path in places], problems)
    return RunFiles(
        folder=folder,
        label=encodable(folder.resolve().name or str(folder)),
        streams=sorted(streams, key=lambda stream: (stream.rank is not None, stream.replica or 0)),
        goodput=[
            account
            for replica, path in places
            for account in _goodput(path, replica, streams, problems)
        ],
        launcher_events=_launcher_events(folder / LAUNCH_LOGS / LAUNCH_EVENTS, streams, problems),
        config=config,
        config_text=config_text,
        problems=problems.listed(),
    )


def unique_labels(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Return the runs with unique labels: those with equal folder names get more of their path,
    and a number if that is not enough."""
    counts: dict[str, int] = {}
    labeled = []
    names = [run.label for run in runs]
    for run in runs:
        label = run.label
        if names.count(label) > 1:
            label = encodable("/".join(run.folder.resolve().parts[-2:]).lstrip("/"))
        counts[label] = counts.get(label, 0) + 1
        label = f"{label} ({counts[label]})" if counts[label] > 1 else label
        labeled.append(replace(run, label=label))
    return labeled


def _replica_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        match = _REPLICA.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def _streams(folder: Path, replica: int | None, problems: Problems) -> Iterator[Stream]:
    """Yield the streams of the current run; rotated files (metrics.1.jsonl) belong to earlier
    runs."""
    ranks = sorted(
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _RANK_METRICS.fullmatch(path.name))
    )
    for rank, path in [(None, folder / METRICS), *ranks]:
        if not path.is_file():
            continue
        steps: list[Step] = []
        events: list[RunEvent] = []
        for where, line in json_lines(path, problems):
            try:
                if "event" in line:
                    events.append(_event(line))
                else:
                    steps.append(_step(line))
            except ValueError as error:
                problems.add(f"{where}: {error}; the line is skipped")
        yield Stream(replica=replica, rank=rank, steps=steps, events=events)


def _step(line: Mapping[str, Any]) -> Step:
    """Parse a step. Raises ValueError with the problem."""
    skipped = line.get("skipped", False)
    if not isinstance(skipped, bool):
        raise ValueError(f"skipped must be true or false, got {shortened(skipped)}")
    load = line.get("router_load") or {}
    if not isinstance(load, dict):
        raise ValueError(f"router_load must be an object, got {shortened(load)}")
    values = {name: number_of(name, line.get(name)) for name in NUMBERS}
    values["time"] = _time(line)
    return Step(
        step=_step_number(line),
        skipped=skipped,
        values=values,
        router_load={
            name: number
            for name, value in load.items()
            if (number := number_of(f"router_load.{name}", value)) is not None
        },
    )


def _event(line: Mapping[str, Any]) -> RunEvent:
    """Parse an event. Raises ValueError with the problem."""
    name = line["event"]
    if not isinstance(name, str):
        raise ValueError(f"event must be a string, got {shortened(name)}")
    values = {k: v for k, v in line.items() if k not in ("event", "step", "time")}
    return RunEvent(name, _step_number(line), _time(line), values)


def _step_number(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    if type(step) is not int or not 0 <= step < _LARGEST_STEP:
        raise ValueError(f"step must be an integer of at least 0, got {shortened(step)}")
    return step


def _time(line: Mapping[str, Any]) -> float | None:
    time = number_of("time", line.get("time"))
    if time is not None and not 0 <= time < _LATEST_TIME:
        raise ValueError(f"time must be Unix time in seconds, got {shortened(time)}")
    return time


def _goodput(
    folder: Path, replica: int | None, streams: Sequence[Stream], problems: Problems
) -> Iterator[Goodput]:
    """Read the goodput file, or else the newest event with the same values."""
    path = folder / GOODPUT_FILE
    if not path.is_file():
        path = folder / EARLIER_GOODPUT_FILE
    if path.is_file():
        try:
            content = json.loads(path.read_bytes(), parse_constant=reject_constant)
            yield _accounts(cleaned("the object", content), replica)
            return
        except (OSError, ValueError, RecursionError) as error:
            problems.add(f"{path}: not a goodput file: {error}; it is skipped")
    for stream in streams:
        if stream.replica == replica and stream.rank is None:
            for event in reversed(stream.events):
                if "wall_s" in event.values and "goodput" in event.values:
                    try:
                        yield _accounts(event.values, replica)
                    except ValueError as error:
                        problems.add(f"{folder / METRICS}: event {event.name}: {error}")
                    return


def _accounts(values: Any, replica: int | None) -> Goodput:
    """Parse time accounting. Raises ValueError with the problem."""
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    numbers = {
        name: number
        for name, value in values.items()
        if (name == "goodput" or name.endswith("_s"))
        and (number := number_of(name, value)) is not None
    }
    if missing := {"goodput", "wall_s"} - numbers.keys():
        raise ValueError(f"{min(missing)} is missing")
    if negative := [name for name, number in numbers.items() if number < 0]:
        raise ValueError(f"{negative[0]} is negative: {numbers[negative[0]]:g}")
    goodput, wall_s = numbers.pop("goodput"), numbers.pop("wall_s")
    seconds = {name.removesuffix("_s"): number for name, number in numbers.items()}
    return Goodput(replica=replica, goodput=goodput, wall_s=wall_s, seconds=seconds)


def _launcher_events(path: Path, streams: Sequence[Stream], problems: Problems) -> list[RunEvent]:
    if not path.is_file():
        return []
    events = []
    for where, line in json_lines(path, problems):
        try:
            text, time = line.get("text"), _time(line)
            if not isinstance(text, str) or time is None:
                raise ValueError("text must be a string, and time a number")
        except ValueError as error:
            problems.add(f"{where}: {error}; the line is skipped")
            continue
        named = _LAUNCHED_REPLICA.fullmatch(text)
        values = {"replica": int(named[1]) if named else None, "text": named[2] if named else text}
        events.append(RunEvent("launcher", None, time, values))
    return _of_this_run(sorted(events, key=lambda event: event.time or 0.0), streams)


def _of_this_run(events: list[RunEvent], streams: Sequence[Stream]) -> list[RunEvent]:
    """Return the events without those of launchers that ended before the first record: they
    launched an earlier run, whose metrics are in rotated files."""
    first = min((stream.timed[0][0] for stream in streams if stream.timed), default=math.inf)
    starts = [
        place
        for place, event in enumerate(events)
        if event.values["text"] == LAUNCHER_STARTED and (event.time or 0.0) <= first
    ]
    return events[starts[-1] :] if starts else events


def _config(folders: Sequence[Path], problems: Problems) -> tuple[str, dict[str, Any]]:
    """Return the first resolved config: its text, and its tables."""
    for folder in folders:
        path = folder / _CONFIG
        if not path.is_file():
            continue
        text = ""
        try:
            text = path.read_text(encoding="utf-8")
            return text, cleaned("the config", tomllib.loads(text), is_json=False)
        except (OSError, ValueError, RecursionError) as error:
            problems.add(f"{path}: not a TOML file: {error}")
            return text, {}
    return "", {}
