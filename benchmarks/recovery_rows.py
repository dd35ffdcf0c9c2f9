"""The rows of runs with faults: ours with one of its lighthouses, against the peers.

Lost and repeated samples of the product show in its losses: each is a sum over all samples of a
step, with weights that depend on all samples before, so a sample that is skipped, repeated or used
in another step shows from there on. The peer on torchft records the batches of its own data that
each step used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Comparison, Result
from benchmarks.processes import THREADS
from benchmarks.recovery_faults import FailureSchedule, FaultyRun, Line, Recovery
from benchmarks.step import START_GOAL

TOLERANCE = 2e-4
"""Relative, float32 over hundreds of steps: the present replicas add the same terms in another
order. One other sample of a few hundred tokens changes a loss by more than ten times that."""
_MAX_FAILED_STEPS = 1
_NUM_LOSSES = 8
"""Number of first steps, which all variants take without faults."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All runs of a variant."""

    name: str
    runs: Sequence[FaultyRun]

    @property
    def recoveries(self) -> list[Recovery]:
        return [recovery for run in self.runs for recovery in run.recoveries]

    @property
    def lighthouse_stalls_s(self) -> list[float]:
        return [stall for run in self.runs for stall in run.lighthouse_stalls_s]

    @property
    def steps(self) -> list[Line]:
        """Committed steps of all runs."""
        return [step for run in self.runs for step in run.reader.steps()]

    def each(self, value: Callable[[Recovery], float | None]) -> list[float]:
        """The value of each fault that has one."""
        values = map(value, self.recoveries)
        return [known for known in values if known is not None]

    def text(self) -> str:
        """All faults in one line."""
        shown = ", ".join(
            f"{recovery.stall_s:.2f} s stall ({recovery.failed_steps} uncommitted), "
            f"{recovery.restart.total_s:.1f} s restart"
            for recovery in self.recoveries
        )
        lighthouse = " ".join(f"{stall_s:.2f}" for stall_s in self.lighthouse_stalls_s)
        steps = " ".join(f"{run.step_s * 1e3:.0f}" for run in self.runs)
        more = f"; lighthouse killed: {lighthouse} s" if lighthouse else ""
        return f"{self.name}: median step {steps} ms; {shown}{more}"


def compare(runs: Runs, reference: Sequence[Line], dtype: str) -> Comparison:
    """Compare the first steps of a variant with a run without faults, which has `dtype`."""
    comparison = Comparison(runs.name, other="reference run")
    for run in runs.runs:
        first = [line.values["loss"] for line in run.reader.progress()[:_NUM_LOSSES]]
        expected = [line.values["loss"] for line in reference[:_NUM_LOSSES]]
        comparison.close_losses(first, expected, shown=1)
        starts = run.reader.events("start", 0, since_s=0.0)
        # The product's trainer takes both from its configuration and environment.
        values = {"dtype": dtype, "threads": THREADS, **(starts[0].values if starts else {})}
        comparison.same("dtype", values["dtype"], dtype)
        comparison.same("threads", values["threads"], THREADS)
    comparison.note(runs.text())
    return comparison


def rows_of(
    ours: Runs, peer: Runs, reference: Sequence[Line], max_stall_s: float, *, valid: bool
) -> Iterator[Result]:
    """The cost of a killed rank and its restart, and of a killed lighthouse."""
    comparison = Comparison(ours.name, other="required")
    comparison.same("valid comparison of all variants", valid, True)
    stalls, peers = (
        ours.each(lambda recovery: recovery.stall_s),
        peer.each(lambda recovery: recovery.stall_s),
    )
    for name, of in (("median", median), ("p95", _p95)):
        metric = f"survivor's stall, {name} of {len(stalls)}"
        yield comparison.value(metric, "s", of(stalls), peer=of(peers), goal=max_stall_s)
    failed, by_peer = (max(runs.each(lambda each: each.failed_steps)) for runs in (ours, peer))
    metric = "uncommitted steps of a fault, the most"
    yield comparison.value(metric, "steps", failed, peer=by_peer, goal=_MAX_FAILED_STEPS)
    yield comparison.value("survivors dead", "ranks", _deaths(ours), peer=_deaths(peer), goal=0)

    differing = difference(ours.steps, reference)
    lost = repeated = 0
    for run in peer.runs:
        counts = batches_lost_and_repeated(run.reader.steps())
        lost, repeated = lost + counts[0], repeated + counts[1]
    yield comparison.value(
        f"samples lost or repeated, losses compared to {TOLERANCE:g}",
        "steps that differ (peer: batches)",
        differing.wrong,
        peer=lost + repeated,
        goal=0,
        valid=differing.compared > _NUM_LOSSES,
    )
    yield comparison.value("steps compared", "steps", differing.compared)
    yield comparison.value("batches that the peer lost", "batches", lost)
    donors = [median(runs.each(lambda each: each.donor_stall_s)) for runs in (ours, peer)]
    yield comparison.value("donor's stall, median", "s", donors[0], peer=donors[1])
    for name in ("total", "boot", "import", "quorum", "transfer", "step"):
        restarts = [
            median(getattr(each.restart, f"{name}_s") for each in runs.recoveries)
            for runs in (ours, peer)
        ]
        if name == "total":
            metric = "restart to first committed step, median"
            yield comparison.ratio(metric, "s", restarts[0], peer=restarts[1], goal=START_GOAL)
        else:
            yield comparison.value(f"restart: {name}, median", "s", restarts[0], peer=restarts[1])
    if ours.lighthouse_stalls_s:
        yield comparison.value(
            "stall where the lighthouse is killed, median",
            "s",
            median(ours.lighthouse_stalls_s),
            peer=median(peer.lighthouse_stalls_s) if peer.lighthouse_stalls_s else None,
        )


def schedule_rows(
    ours: Mapping[str, FaultyRun],
    peers: Mapping[str, FaultyRun],
    schedule: FailureSchedule,
    *,
    valid: bool,
) -> Iterator[Result]:
    """The time to the same work, without failures and with those of a schedule."""
    steps, mean_s = schedule.steps, schedule.mean_interval_s
    comparison = Comparison(f"the work of {steps} steps", other="required")
    comparison.same("valid comparison of all variants", valid, True)
    for name, run in {**ours, **peers}.items():
        comparison.note(
            f"{name}: {run.undisturbed_s:.1f} s without failures, {run.disturbed_s:.1f} s with "
            f"{run.failures}"
        )
    for own, run in ours.items():
        for name, peer in peers.items():
            pair = f"{own}, against {name}"
            metric = f"time without failures: {pair}"
            yield comparison.value(metric, "s", run.undisturbed_s, peer=peer.undisturbed_s)
            metric = f"time with a failure every {mean_s:g} s: {pair}"
            yield comparison.ratio(metric, "s", run.disturbed_s, peer=peer.disturbed_s, goal=1.0)
            metric = f"goodput with a failure every {mean_s:g} s: {pair}"
            yield comparison.value(metric, "of the time", run.goodput, peer=peer.goodput)


def _deaths(runs: Runs) -> int:
    of_faults = sum(recovery.survivors_dead for recovery in runs.recoveries)
    return of_faults + sum(run.lighthouse_deaths for run in runs.runs)


def _p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % do not exceed; the largest of few."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of the steps of a run from those of the reference run."""

    compared: int
    """Steps in both runs."""
    wrong: int
    """Steps with another loss or number of targets."""


def difference(lines: Sequence[Line], reference: Sequence[Line]) -> Difference:
    """Compare every line, including those of repeated steps."""
    expected = {line.step: line for line in reference}
    pairs = [(line, expected[line.step]) for line in lines if line.step in expected]
    off = [_off(line, target) for line, target in pairs]
    return Difference(
        compared=len({line.step for line, _ in pairs}),
        wrong=sum(not value <= TOLERANCE for value in off),
    )


def _off(line: Line, target: Line) -> float:
    if line.values["num_target_tokens"] != target.values["num_target_tokens"]:
        return float("inf")
    loss = target.values["loss"]
    return abs(line.values["loss"] - loss) / abs(loss)


def batches_lost_and_repeated(lines: Sequence[Line]) -> tuple[int, int]:
    """Count the peer's lost and repeated batches, up to the last batch that each replica used."""
    lost = repeated = 0
    for replica in {line.replica for line in lines}:
        # A healing replica contributes nothing.
        took_part = [line for line in lines if line.replica == replica and line.values["took_part"]]
        used = [line.values["batch"] for line in took_part]
        lost += max(used) + 1 - len(set(used))
        repeated += len(used) - len(set(used))
    return lost, repeated
