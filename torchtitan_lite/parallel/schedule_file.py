"""A pipeline's order from a file: torch's CSV form without communication, one row a rank.

A cell is `0F3` (stage 0, forward, microbatch 3), with B for backward, or I and W for its two parts;
or `(0F3;1B2)OVERLAP_F_B`, which torch runs as its two actions one after the other; or empty.
Invariant: an order that is returned runs to its end in torch's runtime, each microbatch goes
through each stage once each way, and nothing of the file is run. Layer: above errors; `order`,
`timeline`.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from torchtitan_lite.errors import MeshError
from torchtitan_lite.parallel.order import Action, Kind, PipelineOrder
from torchtitan_lite.parallel.timeline import Costs, simulate

_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_BACKWARD: tuple[Kind, ...] = ("B", "I", "W")
_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


def read_order(path: str, num_ranks: int) -> PipelineOrder:
    """The order in the file at `path`, for `num_ranks` ranks of a pipeline.

    Raises MeshError that names the file, and the row and column where there is one.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        return parse_order(text, num_ranks)
    except FileNotFoundError:
        relative = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
        problem = f"nothing there{relative}."
    except OSError as error:
        problem = f"cannot be read: {error.strerror}."
    except UnicodeDecodeError:
        problem = "is not a text file in UTF-8."
    except MeshError as error:
        problem = str(error)
    raise MeshError(f'parallelism.pipeline_parallel_schedule_csv = "{path}": {problem}')


def parse_order(text: str, num_ranks: int) -> PipelineOrder:
    """The order that `text` holds, checked. Raises MeshError."""
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
    simulate(order, Costs())
    return order


def _actions(cell: str, row: int, column: int) -> list[Action]:
    parts = [cell] if cell else []
    if overlap := _OVERLAP.fullmatch(cell):
        parts = [part.strip() for part in overlap.groups()]
    found = [_ACTION.fullmatch(part) for part in parts]
    if not all(found):
        raise MeshError(
            f'row {row}, column {column}: "{cell}" is not an action. Needed: stage, one of F, B, '
            "I, W, and microbatch, such as 0F3; or (0F3;1B2)OVERLAP_F_B; or nothing."
        )
    return [Action(int(match[1]), _KINDS[match[2]], int(match[3])) for match in found if match]


def _check_stages(rows: Iterable[tuple[Action, ...]]) -> None:
    """Each rank holds a stage, each stage lies on one rank, and none is left out."""
    holders: dict[int, int] = {}
    for row, actions in enumerate(rows, start=1):
        if not actions:
            raise MeshError(f"row {row} has no action; every rank of a pipeline holds a stage.")
        for action in actions:
            holder = holders.setdefault(action.stage, row)
            if holder != row:
                raise MeshError(
                    f"stage {action.stage} stands in row {holder} and, as {action}, in row {row}; "
                    "a stage lies on one rank."
                )
    missing = set(range(max(holders) + 1)) - set(holders)
    if missing:
        raise MeshError(
            f"stages must be 0 to n-1, and there is {_listed(holders)}, but not {_listed(missing)}."
        )


def _check_each_once(order: PipelineOrder) -> None:
    """Each microbatch goes through each stage once forward, and once backward in one piece or in
    two."""
    count = Counter(action for row in order.rows for action in row)
    microbatches = {action.microbatch for action in count}
    missing = set(range(max(microbatches) + 1)) - microbatches
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
    """What a rank needs of itself stands before, and the losses come in the order in which
    torch's runtime counts them."""
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
    """The first few of `numbers`."""
    first, *others = sorted(numbers)
    shown = [first, *others[:9]]
    return ", ".join(map(str, shown)) + (", ..." if len(others) > 9 else "")
