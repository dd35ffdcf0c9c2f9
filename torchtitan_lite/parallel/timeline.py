"""When each action of a pipeline runs, if actions cost what they are said to cost and messages cost
nothing: a simulation in plain data, without ranks. Layer: above errors; `order`.

Invariant: each rank runs its row in order and one action at a time, each as soon as what it needs
is there.
"""

from dataclasses import dataclass

from torchtitan_lite.errors import MeshError
from torchtitan_lite.parallel.order import Action, PipelineOrder


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long an action lasts, in units of the caller's choice."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    stage_weights: tuple[float, ...] = ()
    """By what the costs of each stage are multiplied; empty: all stages cost the same."""

    def of(self, action: Action) -> float:
        """How long `action` lasts. A full backward costs its two parts."""
        kinds = {
            "F": self.forward,
            "B": self.backward_input + self.backward_weight,
            "I": self.backward_input,
            "W": self.backward_weight,
        }
        return kinds[action.kind] * (self.stage_weights[action.stage] if self.stage_weights else 1)


@dataclass(frozen=True)
class Span:
    """An action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of the pipeline in time."""

    rows: tuple[tuple[Span, ...], ...]
    """What each rank does, in rising time."""

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(span.end for row in self.rows for span in row)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they wait."""
        busy = sum(span.end - span.start for row in self.rows for span in row)
        return 1 - busy / (len(self.rows) * self.makespan)


def simulate(order: PipelineOrder, costs: Costs) -> Timeline:
    """The timeline of `order`. Raises MeshError with what each rank waits for when ranks wait for
    each other and the order never comes to its end."""
    last = order.num_stages - 1
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in order.rows]
    progress = True
    while progress:
        progress = False
        for row, done in zip(order.rows, rows, strict=True):
            for action in row[len(done) :]:
                needed = _needed(action, last)
                if any(other not in ends for other in needed):
                    break
                free = [done[-1].end] if done else [0.0]
                start = max(free + [ends[other] for other in needed])
                done.append(Span(action, start, start + costs.of(action)))
                ends[_gives(action)] = done[-1].end
                progress = True
    stuck = []
    for rank, (row, done) in enumerate(zip(order.rows, rows, strict=True)):
        if len(done) < len(row):
            missing = [n for n in _needed(row[len(done)], last) if n not in ends]
            stuck.append(
                f"rank {rank} stops before {row[len(done)]}, since it needs {_words(missing[0])}"
            )
    if stuck:
        raise MeshError(f"The order cannot be run to its end: {'; '.join(stuck)}.")
    return Timeline(tuple(map(tuple, rows)))


def _gives(action: Action) -> Action:
    """What others see of an action: a full backward gives the gradient of the input as I does."""
    return Action(action.stage, "I", action.microbatch) if action.kind == "B" else action


def _needed(action: Action, last: int) -> list[Action]:
    """What must have ended before `action` can start."""
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
