"""Saving and loading a training state against torch DCP, torchtitan, and plain copies and files.

python -m benchmarks.checkpoint [--quick] [--json PATH]

A state of a model and both moments of AdamW, sharded over 1, 2 and 4 gloo ranks of one thread. The
honest cost of a save is what it adds to the wall time of the steps that it overlaps: background
work counts. Blocked seconds, CPU seconds of all processes until the save is durable, and the time
until then are shown too. torch DCP runs as torchtitan uses it and in its best mode; torchtitan's
own manager is a variant where it is installed (see `checkpoint_variants`). The files are in the
directory of temporary files, which should be on a disk.

The exit status is 1 if a process fails; a missed goal is only reported in its row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.checkpoint_crash import Crash, measure_crash
from benchmarks.checkpoint_rank import measure_rank
from benchmarks.checkpoint_state import STEPS
from benchmarks.checkpoint_variants import GROUPS, TORCHTITAN_ASYNC
from benchmarks.harness import Comparison, Result, main
from benchmarks.processes import run_ranks

_DCP = ("DCP synchronous", "DCP thread", "DCP process")
_LIKE_TORCHTITAN = "DCP thread"
"""Variant that torchtitan's manager calls; its substitute where torchtitan is not installed."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCase:
    """A state on a number of processes."""

    num_processes: int
    layers: int
    rounds: int
    step_seconds: float
    crashes: int = 5


FULL = [
    CheckpointCase(num_processes=number, layers=12, rounds=5, step_seconds=0.3)
    for number in (1, 2, 4)
]
QUICK = [CheckpointCase(num_processes=2, layers=1, rounds=2, step_seconds=0.02, crashes=1)]


def measure(cases: Sequence[CheckpointCase], folder: Path) -> Iterator[Result]:
    """Measure all cases, with files in `folder`."""
    for case in cases:
        yield from _measure_case(case, folder / f"of_{case.num_processes}")


def _measure_case(case: CheckpointCase, folder: Path) -> Iterator[Result]:
    measured = _Measured(
        {group: _measure_group(case, group, folder / group) for group in GROUPS},
        [
            measure_crash(case.num_processes, case.layers, folder / f"crash_{turn}")
            for turn in range(case.crashes)
        ],
    )
    comparison = measured.comparison()
    for metric, unit, ours, goal, reference in measured.figures():
        floor, peer = reference.get("floor"), reference.get("peer")
        yield comparison.ratio(metric, unit, ours, floor=floor, peer=peer, goal=goal)


def _measure_group(case: CheckpointCase, group: str, folder: Path) -> list[Mapping[str, Any]]:
    """Measurements of each rank."""
    arguments = {
        "folder": str(folder),
        "group": group,
        "layers": case.layers,
        "rounds": case.rounds,
        "step_seconds": case.step_seconds,
    }
    return run_ranks(measure_rank, arguments, case.num_processes, folder)


class _Measured:
    """Measurements of all ranks of a case."""

    def __init__(
        self, groups: Mapping[str, Sequence[Mapping[str, Any]]], crashes: Sequence[Crash]
    ) -> None:
        self._groups, self._crashes = groups, crashes
        self._ranks = groups["saves"]
        self.bytes = sum(rank["bytes"] for rank in self._ranks)

    def comparison(self) -> Comparison:
        """The case, with all measurements."""
        name = f"{len(self._ranks)} proc, {self.bytes / 1e6:.0f} MB"
        comparison = Comparison(name, other="expected")
        wrong = sorted({name for rank in self._ranks for name in rank["wrong_loads"]})
        comparison.same("variants that load other bytes than were saved", wrong, [])
        variants = [name for ranks in self._groups.values() for name in ranks[0]["turns"]]
        for name in dict.fromkeys(variants):
            comparison.note(
                f"{name}: extra {self._difference(name):.3f} s per cycle, blocked "
                f"{self._slowest(name, 'blocked_s'):.3f} s, durable after "
                f"{self._slowest(name, 'durable_s'):.2f} s, {self._cpu(name):.2f} CPU s"
            )
        for name in self._ranks[0]["loads"]:
            comparison.note(
                f"load {name}: {max(self._load(name, 's')):.3f} s, "
                f"{sum(self._load(name, 'read')) / 1e6:.0f} MB read"
            )
        for crash in self._crashes:
            comparison.note(
                f"killed: durable after {crash.durable_s:.2f} s, restored {crash.restart_s:.2f} s "
                f"after torch's import, {crash.read_bytes} B read, {crash.lost_steps} steps lost"
            )
        return comparison

    def figures(self) -> Iterator[tuple[str, str, float, float, dict[str, float]]]:
        """Metric, unit, our value, goal, and the floor or peer."""
        size, ranks = float(self.bytes), len(self._ranks)
        memcpy = {"floor": self._slowest("memcpy", "blocked_s") / STEPS}
        snapshots, variants = "ours, snapshots only", self._ranks[0]["turns"]
        # One rank leaves one of the two cores that the goal is meant for.
        goal = 1.0 if ranks == 1 else 1.5
        ours = self._slowest(snapshots, "blocked_s") / STEPS
        yield "blocked by a snapshot, memcpy", "s", ours, 1.2, memcpy
        ours = self._extra(snapshots) / STEPS
        yield "extra wall time of a snapshot, memcpy", "s", ours, goal, memcpy

        name = TORCHTITAN_ASYNC if TORCHTITAN_ASYNC in variants else _LIKE_TORCHTITAN
        peer = {"peer": self._difference(name)}
        yield f"extra wall of a save, {name}", "s", self._extra("ours"), 0.25, peer
        ours = self._extra("ours, snapshot each step")
        yield f"with a snapshot each step, {name}", "s", ours, 0.5, peer
        best = min(_DCP, key=self._difference)
        peer = {"peer": self._difference(best)}
        yield f"extra wall, {best}", "s", self._extra("ours"), 1.0, peer
        yield f"CPU seconds, {best}", "s", self._cpu("ours"), 0.25, {"peer": self._cpu(best)}
        floor = {"floor": self._slowest("safetensors", "blocked_s")}
        ours = self._slowest("ours, synchronous", "blocked_s")
        yield "synchronous save, safetensors and fsync", "s", ours, 1.0, floor

        for heat, plain_name, what, goal in (
            ("warm", "safetensors", "safetensors and copy", 1.0),
            ("cold", "readinto", "readinto", 1.3),
        ):
            ours, plain = (max(self._load(f"{name}, {heat}", "s")) for name in ("ours", plain_name))
            yield f"load, {heat}, {what}", "s", ours, goal, {"floor": plain}
        ours = sum(self._load("ours, cold", "read"))
        yield "bytes read, unique bytes", "B", ours, 1.05, {"floor": size}

        shard = {"floor": size / ranks}
        ours = max(self._memory("ours") - self._memory("none"), 0.0)
        yield "memory beyond the slots, shard", "B", ours, 0.25, shard
        yield "memory of a restore, shard", "B", self._memory("restore"), 0.1, shard

        # Against one second, because no peer recovers what is left after a crash.
        second = {"floor": 1.0}
        yield "durable after a kill", "s", self._of_crash("durable_s"), 2.0, second
        yield "back from shared memory", "s", self._of_crash("restart_s"), 1.2, second
        yield "bytes read for it", "B", self._of_crash("read_bytes"), 0.0, {"floor": size}

    def _turns(self, name: str) -> list[Mapping[str, Sequence[Mapping[str, float]]]]:
        """The turns of each rank in the group of a variant."""
        group = next(ranks for ranks in self._groups.values() if name in ranks[0]["turns"])
        return [rank["turns"] for rank in group]

    def _memory(self, what: str) -> float:
        """Peak bytes of the worst rank, with its child processes."""
        return float(max(rank["memory"][what] for rank in self._ranks))

    def _of_crash(self, what: str) -> float:
        return float(median(getattr(crash, what) for crash in self._crashes))

    def _slowest(self, name: str, key: str) -> float:
        """The median of the slowest rank."""
        return max(median(turn[key] for turn in turns[name]) for turns in self._turns(name))

    def _difference(self, name: str) -> float:
        """Median wall seconds of a cycle, until its save is durable, beyond a cycle without a save
        in the same round."""
        turns = self._turns(name)[0]
        pairs = zip(turns[name], turns["none"], strict=True)
        return median(cycle["wall_s"] - none["wall_s"] for cycle, none in pairs)

    def _extra(self, name: str) -> float:
        # A negative value is noise.
        return max(self._difference(name), 0.0)

    def _cpu(self, name: str) -> float:
        """CPU seconds of all ranks and their child processes beyond a cycle without a save."""
        return sum(
            median(
                cycle["cpu_s"] - none["cpu_s"]
                for cycle, none in zip(turns[name], turns["none"], strict=True)
            )
            for turns in self._turns(name)
        )

    def _load(self, name: str, key: str) -> list[float]:
        """The median of each rank."""
        return [median(turn[key] for turn in rank["loads"][name]) for rank in self._ranks]


if __name__ == "__main__":
    main("Checkpoints against torch DCP and plain files.", measure, full=FULL, quick=QUICK)
