"""What the drawings of a pipeline show: a simulated step, and the words for it."""

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
    """A step of a pipeline, to be drawn."""

    schedule: str
    timeline: Timeline
    ranks: tuple[int, ...]
    """The rank that holds each stage."""
    num_microbatches: int
    note: str
    """What the actions cost."""

    @property
    def facts(self) -> str:
        """The numbers of the pipeline, in a line."""
        return (
            f"{len(self.timeline.rows)} ranks, {len(self.ranks)} stages, "
            f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''}, "
            f"bubble {self.timeline.bubble_fraction:.1%} of the ranks' time"
        )

    @property
    def kinds(self) -> list[str]:
        """The kinds of action that occur, in the order of `KINDS`."""
        found = {span.action.kind for row in self.timeline.rows for span in row}
        return [kind for kind in KINDS if kind in found]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in rising order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def shade_of(self, action: Action) -> int:
        """The place of an action's stage among those of its rank, from 0."""
        return self.stages_of(self.ranks[action.stage]).index(action.stage)

    @property
    def num_shades(self) -> int:
        """The most stages that a rank holds."""
        return max(len(self.stages_of(rank)) for rank in range(len(self.timeline.rows)))


def tick_step(room: float) -> int:
    """The least of 1, 2, 5, 10, 20, ... that is not below `room`: how far apart numbers on the axis
    of time stand, when each needs that much time's room."""
    step, factors = 1, (2, 2.5, 2)
    for index in range(60):
        if step >= room:
            break
        step = int(step * factors[index % 3])
    return step
