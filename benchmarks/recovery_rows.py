"""The rows of disturbed runs: ours by one of its lighthouses, beside the peers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.agreement import Agreement
from benchmarks.processes import THREADS
from benchmarks.recovery_faults import Disturbed, Recovery
from benchmarks.recovery_reader import Told
from benchmarks.recovery_samples import TOLERANCE, batches_lost_and_repeated, difference
from benchmarks.rows import Row, compare, demand, tell
from benchmarks.start_time import GOAL as START_GOAL

_MOST_FAILED_STEPS = 1
_LEAST_GOODPUT = 0.9
_NUM_LOSSES = 8
"""Of the first steps, which all sides take undisturbed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A side, and all of its runs."""

    name: str
    runs: Sequence[Disturbed]

    @property
    def recoveries(self) -> list[Recovery]:
        return [recovery for run in self.runs for recovery in run.recoveries]

    @property
    def lighthouse_stalls_s(self) -> list[float]:
        return [stall for run in self.runs for stall in run.lighthouse_stalls_s]

    @property
    def told(self) -> list[Told]:
        """Committed steps, of all runs."""
        return [step for run in self.runs for step in run.reader.steps()]

    def each(self, value: Callable[[Recovery], float | None]) -> list[float]:
        """Of each fault that has it."""
        found = map(value, self.recoveries)
        return [one for one in found if one is not None]

    def text(self) -> str:
        """Every fault, for people."""
        shown = ", ".join(
            f"{one.stall_s:.2f} s stall ({one.failed_steps} uncommitted) "
            f"{one.returned.total_s:.1f} s return"
            for one in self.recoveries
        )
        lighthouse = " ".join(f"{one:.2f}" for one in self.lighthouse_stalls_s)
        steps = " ".join(f"{run.step_s * 1e3:.0f}" for run in self.runs)
        more = f"; lighthouse killed: {lighthouse} s" if lighthouse else ""
        return f"{self.name}: median step {steps} ms; {shown}{more}"


def agree(result: Result, straight: Sequence[Told], dtype: str) -> Agreement:
    """Whether a side has done the work of a straight run, which has `dtype`."""
    agreement = Agreement(result.name, other="straight run")
    for run in result.runs:
        first = [one.values["loss"] for one in run.reader.progress()[:_NUM_LOSSES]]
        expected = [one.values["loss"] for one in straight[:_NUM_LOSSES]]
        agreement.close_losses(first, expected, stride=_NUM_LOSSES)
        starts = run.reader.events("start", 0, since_s=0.0)
        # The product's trainer leaves both to its configuration and the environment.
        said = {"dtype": dtype, "threads": THREADS, **(starts[0].values if starts else {})}
        agreement.same("dtype", said["dtype"], dtype)
        agreement.same("threads", said["threads"], THREADS)
    agreement.note(result.text())
    return agreement


def rows_of(
    ours: Result, peer: Result, straight: Sequence[Told], stall_goal_s: float, *, comparable: bool
) -> Iterator[Row]:
    """What a rank that is killed and returns costs, and a lighthouse that is."""
    stalls, peers = ours.each(lambda one: one.stall_s), peer.each(lambda one: one.stall_s)
    common = {"case": ours.name, "comparable": comparable}
    for name, of in (("median", median), ("p95", _p95)):
        yield demand(
            metric=f"survivor's stall, {name} of {len(stalls)}",
            unit="s",
            ours=of(stalls),
            peer=of(peers),
            goal=stall_goal_s,
            **common,
        )
    yield demand(
        metric="uncommitted steps of a fault, the most",
        unit="steps",
        ours=max(ours.each(lambda one: one.failed_steps)),
        peer=max(peer.each(lambda one: one.failed_steps)),
        goal=_MOST_FAILED_STEPS,
        **common,
    )
    yield demand(
        metric="survivors dead",
        unit="ranks",
        ours=_deaths(ours),
        peer=_deaths(peer),
        goal=0,
        **common,
    )
    yield _samples_row(ours, peer, straight, comparable=comparable)
    donors = ours.each(lambda one: one.donor_stall_s), peer.each(lambda one: one.donor_stall_s)
    yield tell(
        metric="donor's stall, median", unit="s", ours=median(donors[0]), peer=median(donors[1]),
        **common,
    )  # fmt: skip
    yield compare(
        metric="restart to first committed step, median",
        unit="s",
        ours=median(ours.each(lambda one: one.returned.total_s)),
        peer=median(peer.each(lambda one: one.returned.total_s)),
        goal=START_GOAL,
        **common,
    )
    for part in ("boot", "import", "quorum", "transfer", "step"):
        yield tell(
            metric=f"restart: {part}, median",
            unit="s",
            ours=median(getattr(one.returned, f"{part}_s") for one in ours.recoveries),
            peer=median(getattr(one.returned, f"{part}_s") for one in peer.recoveries),
            **common,
        )
    if ours.lighthouse_stalls_s:
        yield tell(
            metric="stall where the lighthouse is killed, median",
            unit="s",
            ours=median(ours.lighthouse_stalls_s),
            peer=median(peer.lighthouse_stalls_s) if peer.lighthouse_stalls_s else None,
            **common,
        )


def goodput_rows(
    ours: Disturbed, peers: Sequence[tuple[str, Disturbed]], period_s: float, *, comparable: bool
) -> Iterator[Row]:
    """Undisturbed wall time over disturbed, at one fault in so many seconds."""
    case, unit = f"a fault every {period_s:g} s", "undisturbed / disturbed"
    yield demand(
        case=case,
        metric="goodput",
        unit=unit,
        ours=ours.goodput,
        goal=_LEAST_GOODPUT,
        comparable=comparable,
        more_is_better=True,
    )
    for name, peer in peers:
        yield compare(
            case=case,
            metric=f"goodput against {name}",
            unit=unit,
            ours=ours.goodput,
            peer=peer.goodput,
            goal=1.0,
            comparable=comparable,
            more_is_better=True,
        )


def _samples_row(ours: Result, peer: Result, straight: Sequence[Told], *, comparable: bool) -> Row:
    found = difference(ours.told, straight)
    lost = repeated = 0
    for run in peer.runs:
        counts = batches_lost_and_repeated(run.reader.steps())
        lost, repeated = lost + counts[0], repeated + counts[1]
    return demand(
        case=ours.name,
        metric=f"samples lost or repeated, {found.compared} steps compared to {TOLERANCE:g}",
        unit=f"steps that differ (peer: batches, {lost} lost)",
        ours=found.wrong,
        peer=lost + repeated,
        goal=0,
        comparable=comparable and found.compared > _NUM_LOSSES,
    )


def _deaths(result: Result) -> int:
    of_faults = sum(one.survivors_dead for one in result.recoveries)
    return of_faults + sum(run.lighthouse_deaths for run in result.runs)


def _p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of all do not exceed: of few, the largest."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]
