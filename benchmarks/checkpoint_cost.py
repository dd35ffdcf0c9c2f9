"""The rows of a comparison of ways to save and load, from what the ranks have measured."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.agreement import Agreement
from benchmarks.checkpoint_crash import Crash, measure_crash
from benchmarks.checkpoint_side import STEPS
from benchmarks.checkpoint_sides import SIDES
from benchmarks.checkpoint_torchtitan import ASYNCHRONOUS
from benchmarks.processes import run
from benchmarks.rows import Row, compare

_DCP = ("DCP synchronous", "DCP thread", "DCP process")
_AS_TORCHTITAN = "DCP thread"
"""What torchtitan's manager calls; stands in where that is not installed."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCase:
    """A state, on so many processes."""

    num_processes: int
    layers: int
    rounds: int
    step_seconds: float
    crashes: int = 5


def measure_case(case: CheckpointCase, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """All rows of a case."""
    measured = _Measured(
        {group: _of_ranks(case, group, folder / group) for group in SIDES},
        [
            measure_crash(case.num_processes, case.layers, folder / f"crash_{turn}")
            for turn in range(case.crashes)
        ],
    )
    name = f"{case.num_processes} proc, {measured.bytes / 1e6:.0f} MB"
    agreement = measured.agreement(name)
    for figure in measured.figures():
        row = compare(
            case=name,
            metric=figure.metric,
            unit=figure.unit,
            ours=figure.ours,
            floor=figure.other if figure.is_floor else None,
            peer=None if figure.is_floor else figure.other,
            goal=figure.goal,
            comparable=agreement.holds,
        )
        yield row, agreement


def _of_ranks(case: CheckpointCase, group: str, folder: Path) -> list[Mapping[str, Any]]:
    """What each rank has measured of a group."""
    folder.mkdir(parents=True)
    arguments = ["--folder", folder, "--group", group, "--layers", case.layers]
    arguments += ["--rounds", case.rounds, "--step-seconds", case.step_seconds]
    program = ("-m", "benchmarks.checkpoint_turns")
    run(program, list(map(str, arguments)), case.num_processes, folder / "log")
    paths = [folder / f"rank_{rank}.json" for rank in range(case.num_processes)]
    return [json.loads(path.read_text()) for path in paths]


@dataclass(frozen=True)
class _Figure:
    metric: str
    unit: str
    ours: float
    other: float
    goal: float
    is_floor: bool = False


class _Measured:
    """What all ranks have measured, brought together."""

    def __init__(
        self, groups: Mapping[str, Sequence[Mapping[str, Any]]], crashes: Sequence[Crash]
    ) -> None:
        self._groups, self._crashes = groups, crashes
        self._ranks = groups["saves"]
        self.bytes = sum(rank["bytes"] for rank in self._ranks)

    def agreement(self, name: str) -> Agreement:
        """All that was measured, side by side."""
        agreement = Agreement(name, other="wanted")
        faults = sorted({way for rank in self._ranks for way in rank["faults"]})
        agreement.same("ways that load other bytes than were saved", faults, [])
        for side in dict.fromkeys(
            side for one in self._groups.values() for side in one[0]["turns"]
        ):
            agreement.note(
                f"{side}: extra {self._difference(side):.3f} s a cycle, blocked "
                f"{self._slowest(side, 'blocked_s'):.3f} s, durable after "
                f"{self._slowest(side, 'durable_s'):.2f} s, {self._cpu(side):.2f} CPU s"
            )
        for way in self._ranks[0]["loads"]:
            agreement.note(
                f"load {way}: {max(self._load(way, 's')):.3f} s, "
                f"{sum(self._load(way, 'read')) / 1e6:.0f} MB read"
            )
        for crash in self._crashes:
            agreement.note(
                f"killed: durable after {crash.durable_s:.2f} s, back {crash.restart_s:.2f} s "
                f"after torch's import, {crash.read_bytes} B read, {crash.lost_steps} steps lost"
            )
        return agreement

    def figures(self) -> list[_Figure]:
        """What is compared."""
        size, ranks = float(self.bytes), len(self._ranks)
        memcpy = self._slowest("memcpy", "blocked_s") / STEPS
        snapshots, turns = "ours, snapshots only", self._ranks[0]["turns"]
        torchtitan = ASYNCHRONOUS if ASYNCHRONOUS in turns else _AS_TORCHTITAN
        theirs = self._difference(torchtitan)
        best = min(_DCP, key=self._difference)
        beyond = self._memory("ours") - self._memory("none")
        return [
            _Figure(
                "blocked by a snapshot, memcpy",
                "s",
                self._slowest(snapshots, "blocked_s") / STEPS,
                memcpy,
                1.2,
                True,
            ),
            _Figure(
                "extra wall time of a snapshot, memcpy",
                "s",
                self._extra(snapshots) / STEPS,
                memcpy,
                # One process leaves a core of the two that this is meant for.
                1.0 if ranks == 1 else 1.5,
                True,
            ),
            _Figure(f"extra wall of a save, {torchtitan}", "s", self._extra("ours"), theirs, 0.25),
            _Figure(
                f"with a snapshot each step, {torchtitan}",
                "s",
                self._extra("ours, snapshot each step"),
                theirs,
                0.5,
            ),
            _Figure(f"extra wall, {best}", "s", self._extra("ours"), self._difference(best), 1.0),
            _Figure(f"CPU seconds, {best}", "s", self._cpu("ours"), self._cpu(best), 0.25),
            _Figure(
                "synchronous save, safetensors and fsync",
                "s",
                self._slowest("ours, synchronous", "blocked_s"),
                self._slowest("safetensors", "blocked_s"),
                1.0,
                True,
            ),
            _Figure(
                "load, warm, safetensors and copy",
                "s",
                max(self._load("ours, warm", "s")),
                max(self._load("safetensors, warm", "s")),
                1.0,
                True,
            ),
            _Figure(
                "load, cold, readinto",
                "s",
                max(self._load("ours, cold", "s")),
                max(self._load("readinto, cold", "s")),
                1.3,
                True,
            ),
            _Figure(
                "bytes read, unique bytes", "B", sum(self._load("ours, cold", "read")), size, 1.05,
                True,
            ),
            _Figure(
                "memory beyond the slots, shard", "B", max(beyond, 0.0), size / ranks, 0.25, True
            ),
            _Figure(
                "memory of a restore, shard", "B", self._memory("restore"), size / ranks, 0.1, True
            ),
            # Against a second, since nobody else keeps what a crash leaves.
            _Figure(
                "durable after a kill", "s", self._of_crash("durable_s"), 1.0, 2.0, True
            ),
            _Figure(
                "back from shared memory", "s", self._of_crash("restart_s"), 1.0, 1.2, True
            ),
            _Figure("bytes read for it", "B", self._of_crash("read_bytes"), size, 0.0, True),
        ]  # fmt: skip

    def _turns(self, side: str) -> list[Mapping[str, Sequence[Mapping[str, float]]]]:
        """By rank, those of the group in which a side is."""
        group = next(ranks for ranks in self._groups.values() if side in ranks[0]["turns"])
        return [rank["turns"] for rank in group]

    def _memory(self, what: str) -> float:
        """Of the rank that takes most, with its helpers."""
        return float(max(rank["memory"][what] for rank in self._ranks))

    def _of_crash(self, what: str) -> float:
        return float(median(getattr(crash, what) for crash in self._crashes))

    def _slowest(self, side: str, key: str) -> float:
        """The median of the slowest rank."""
        return max(median(turn[key] for turn in turns[side]) for turns in self._turns(side))

    def _difference(self, side: str) -> float:
        """Wall seconds of a cycle, until what it saves is durable, beyond one of the same round
        that saves nothing."""
        turns = self._turns(side)[0]
        pairs = zip(turns[side], turns["none"], strict=True)
        return median(one["wall_s"] - none["wall_s"] for one, none in pairs)

    def _extra(self, side: str) -> float:
        # Less than nothing is the noise of the machine.
        return max(self._difference(side), 0.0)

    def _cpu(self, side: str) -> float:
        """CPU seconds of all ranks and their helpers beyond those of a cycle without a save."""
        return sum(
            median(
                one["cpu_s"] - none["cpu_s"]
                for one, none in zip(turns[side], turns["none"], strict=True)
            )
            for turns in self._turns(side)
        )

    def _load(self, way: str, key: str) -> list[float]:
        """The median of each rank."""
        return [median(turn[key] for turn in rank["loads"][way]) for rank in self._ranks]
