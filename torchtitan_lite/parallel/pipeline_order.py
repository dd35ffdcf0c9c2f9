"""The order in which each rank of a pipeline runs its stages: plain data, read from a file, and
simulated.

A file has torch's CSV form without communication, one row per rank. A cell is `0F3` (stage 0,
forward, microbatch 3), with B for backward, or I and W for its two parts; or
`(0F3;1B2)OVERLAP_F_B`, which torch runs as its two actions in turn; or empty. An order that is
returned runs to its end in torch's runtime, and each microbatch passes through each stage once in
each direction. Nothing in the file is executed.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan_lite.core.errors import MeshError

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """A forward or backward of one microbatch in one stage. Its text is torch's, such as `0F3`."""

    stage: int
    kind: Kind
    """F: forward. B: backward. I and W: backward in two parts, for the input and the weights."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineOrder:
    """The actions of each rank of the pipeline in a step."""

    rows: tuple[tuple[Action, ...], ...]
    """Actions per rank, in order. A rank waits for what an action needs from other ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pp rank that holds each stage."""
        holders = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        return tuple(holders[stage] for stage in sorted(holders))

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_microbatches(self) -> int:
        return len({action.microbatch for row in self.rows for action in row})

    def cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [[str(action) for action in row] for row in self.rows]


def forward_only(ranks: Sequence[int], num_microbatches: int) -> PipelineOrder:
    """Return the order without backward for stages on `ranks`: each rank runs all microbatches
    through its first stage, then through its next, so that no rank waits for itself."""
    rows = [
        tuple(
            Action(stage, "F", microbatch)
            for stage, holder in enumerate(ranks)
            if holder == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(max(ranks) + 1)
    ]
    return PipelineOrder(tuple(rows))


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """Durations of actions, in any unit."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    stage_weights: tuple[float, ...] = ()
    """Factors of the stages; empty: all stages cost the same."""

    def of(self, action: Action) -> float:
        """Return the duration of `action`. A full backward costs the sum of its two parts."""
        kinds = {
            "F": self.forward,
            "B": self.backward_input + self.backward_weight,
            "I": self.backward_input,
            "W": self.backward_weight,
        }
        return kinds[action.kind] * (self.stage_weights[action.stage] if self.stage_weights else 1)


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline."""

    rows: tuple[tuple[Span, ...], ...]
    """Spans per rank, in order of time."""

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(span.end for row in self.rows for span in row)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time in which they wait."""
        busy = sum(span.end - span.start for row in self.rows for span in row)
        return 1 - busy / (len(self.rows) * self.makespan)


def simulate(order: PipelineOrder, costs: ActionCosts) -> Timeline:
    """Simulate `order`: each rank runs its actions in order, one at a time, each as soon as its
    inputs are there; messages take no time. Raises MeshError with what each rank waits for in a
    deadlock."""
    last = order.num_stages - 1
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in order.rows]
    progress = True
    while progress:
        progress = False
        for row, done in zip(order.rows, rows, strict=True):
            for action in row[len(done) :]:
                needed = _needed(action, last)
                if any(dependency not in ends for dependency in needed):
                    break
                free = [done[-1].end] if done else [0.0]
                start = max(free + [ends[dependency] for dependency in needed])
                done.append(Span(action, start, start + costs.of(action)))
                ends[_gives(action)] = done[-1].end
                progress = True
    stuck = []
    for rank, (row, done) in enumerate(zip(order.rows, rows, strict=True)):
        if len(done) < len(row):
            missing = [n for n in _needed(row[len(done)], last) if n not in ends]
            stuck.append(
                f"rank {rank} stops before {row[len(done)]}, because it needs {_words(missing[0])}"
            )
    if stuck:
        raise MeshError(f"The order cannot be run to its end: {'; '.join(stuck)}.")
    return Timeline(tuple(map(tuple, rows)))


def _gives(action: Action) -> Action:
    """Return what others depend on: a full backward provides the input's gradient as I does."""
    return Action(action.stage, "I", action.microbatch) if action.kind == "B" else action


def _needed(action: Action, last: int) -> list[Action]:
    """Return the actions that must end before `action` starts."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [Action(stage, "I", microbatch)]
    above = [Action(stage + 1, "I", microbatch)] if stage < last else []
    return [Action(stage, "F", microbatch), *above]


def _words(action: Action) -> str:
    way = "forward" if action.kind == "F" else "backward"
    return f"the {way} of microbatch {action.microbatch} through stage {action.stage}"


_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_BACKWARD: tuple[Kind, ...] = ("B", "I", "W")
_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def read_order(path: str, num_ranks: int) -> PipelineOrder:
    """Read the order for `num_ranks` pp ranks from the file at `path`.

    Raises MeshError that names the file, and the row and column where there is one.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        return parse_order(text, num_ranks)
    except FileNotFoundError:
        relative = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
        problem = f"does not exist{relative}."
    except OSError as error:
        problem = f"cannot be read: {error.strerror}."
    except UnicodeDecodeError:
        problem = "is not a text file in UTF-8."
    except MeshError as error:
        problem = str(error)
    raise MeshError(f'parallelism.pipeline_parallel_schedule_csv = "{path}": {problem}')


def parse_order(text: str, num_ranks: int) -> PipelineOrder:
    """Parse and check an order. Raises MeshError."""
    try:
        table = list(csv.reader(text.rstrip().splitlines(), strict=True))
    except csv.Error as error:
        raise MeshError(f"is not a table with commas: {error}.") from None
    if len(table) != num_ranks:
        raise MeshError(
            f"{len(table)} row{'' if len(table) == 1 else 's'}, needed one for each rank of "
            f"pipeline_parallel_degree = {num_ranks}."
        )
    rows = [
        tuple(
            action
            for column, cell in enumerate(cells, start=1)
            for action in _actions(cell.strip(), row, column)
        )
        for row, cells in enumerate(table, start=1)
    ]
    _check_stages(rows)
    order = PipelineOrder(tuple(rows))
    _check_each_once(order)
    _check_sequence(order)
    simulate(order, ActionCosts())
    return order


def _actions(cell: str, row: int, column: int) -> list[Action]:
    parts = [cell] if cell else []
    if overlap := _OVERLAP.fullmatch(cell):
        parts = [part.strip() for part in overlap.groups()]
    matches = [_ACTION.fullmatch(part) for part in parts]
    if not all(matches):
        raise MeshError(
            f'row {row}, column {column}: "{cell}" is not an action. Needed: stage, one of F, B, '
            "I, W, and microbatch, such as 0F3; or (0F3;1B2)OVERLAP_F_B; or nothing."
        )
    return [Action(int(match[1]), _KINDS[match[2]], int(match[3])) for match in matches if match]


def _check_stages(rows: Iterable[tuple[Action, ...]]) -> None:
    """Check that each rank holds a stage, each stage is on one rank, and none is missing."""
    holders: dict[int, int] = {}
    for row, actions in enumerate(rows, start=1):
        if not actions:
            raise MeshError(f"row {row} has no action; every rank of a pipeline has a stage.")
        for action in actions:
            holder = holders.setdefault(action.stage, row)
            if holder != row:
                raise MeshError(
                    f"stage {action.stage} is in row {holder} and, as {action}, in row {row}; "
                    "a stage is on one rank."
                )
    missing = set(range(max(holders))) - set(holders)
    if missing:
        raise MeshError(
            f"stages must be 0 to n-1, and there is {_listed(holders)}, but not {_listed(missing)}."
        )


def _check_each_once(order: PipelineOrder) -> None:
    """Check that each microbatch passes each stage once forward and once backward, in one part or
    two."""
    count = Counter(action for row in order.rows for action in row)
    microbatches = {action.microbatch for action in count}
    missing = set(range(max(microbatches))) - microbatches
    if missing:
        raise MeshError(
            f"microbatches must be 0 to m-1, and there is {_listed(microbatches)}, but not "
            f"{_listed(missing)}."
        )
    for stage in range(order.num_stages):
        for microbatch in sorted(microbatches):
            times = {kind: count[Action(stage, kind, microbatch)] for kind in _KINDS.values()}
            where = f"stage {stage}, microbatch {microbatch}"
            if times["F"] != 1:
                forward = Action(stage, "F", microbatch)
                raise MeshError(f"{where}: {forward} stands there {times['F']} times, needed once.")
            if (times["B"], times["I"], times["W"]) not in ((1, 0, 0), (0, 1, 1)):
                shown = ", ".join(
                    f"{Action(stage, kind, microbatch)} {times[kind]} times" for kind in _BACKWARD
                )
                raise MeshError(f"{where}: {shown}. Needed: B once, or I and W once each.")


def _check_sequence(order: PipelineOrder) -> None:
    """Check that each action follows what it needs on the same rank, and that losses come in the
    order in which torch's runtime counts them."""
    for row, actions in enumerate(order.rows, start=1):
        place = {action: index for index, action in enumerate(actions)}
        for action, index in place.items():
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            needed = Action(action.stage, _KINDS[before], action.microbatch) if before else action
            if place[needed] > index:
                raise MeshError(f"row {row}: {action} stands before {needed}, which it needs.")
    last = order.num_stages - 1
    forwards = [
        action
        for action in order.rows[order.ranks[last]]
        if action.stage == last and action.kind == "F"
    ]
    for expected, action in enumerate(forwards):
        if action.microbatch != expected:
            raise MeshError(
                f"row {order.ranks[last] + 1}: {action} stands where {last}F{expected} is needed: "
                "the last stage must run its microbatches forward in rising order."
            )


def _listed(numbers: Iterable[int]) -> str:
    """Format the first few of `numbers`."""
    first, *remaining = sorted(numbers)
    shown = [first, *remaining[:9]]
    return ", ".join(map(str, shown)) + (", ..." if len(remaining) > 9 else "")
