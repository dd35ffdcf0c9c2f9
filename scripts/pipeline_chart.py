"""Contents of the pipeline drawings: a simulated step, and its description."""

from dataclasses import dataclass

from torchtitan_lite.parallel.pipeline_order import Action, Timeline

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input",
    "W": "backward, weights",
}


@dataclass(frozen=True)
class Chart:
    """A pipeline step, to be drawn."""

    schedule: str
    timeline: Timeline
    ranks: tuple[int, ...]
    """The rank that holds each stage."""
    num_microbatches: int
    note: str
    """The costs of the actions."""

    @property
    def facts(self) -> str:
        """Return the numbers of the pipeline, in one line."""
        return (
            f"{len(self.timeline.rows)} ranks, {len(self.ranks)} stages, "
            f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}, "
            f"bubble {self.timeline.bubble_fraction:.1%} of the ranks' time"
        )

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of action that occur, in the order of `KINDS`."""
        used = {span.action.kind for row in self.timeline.rows for span in row}
        return [kind for kind in KINDS if kind in used]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def shade_of(self, action: Action) -> int:
        """Return the position of an action's stage among those of its rank, from 0."""
        return self.stages_of(self.ranks[action.stage]).index(action.stage)

    @property
    def num_shades(self) -> int:
        """Return the maximum number of stages of a rank."""
        return max(len(self.stages_of(rank)) for rank in range(len(self.timeline.rows)))


def tick_step(room: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is at least `room`: the distance between
    labels on the time axis, each of which occupies that much time."""
    step, factors = 1, (2, 2.5, 2)
    for index in range(60):
        if step >= room:
            break
        step = int(step * factors[index % 3])
    return step
