"""Memory of the processes of a disturbed run: at its start and end, and per quorum change."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import linear_regression

import psutil

from tests.chaos.job_view import FaultNotApplicable, JobView
from torchtitan_lite.core.outputs import METRICS
from torchtitan_lite.fault_tolerance.supervision.logs import records

_MIB = 2**20
_MIN_SAMPLES = 3
"""Samples of a trainer from which a slope is computed."""


@dataclass(frozen=True)
class Sample:
    """Memory of a process at one time."""

    taken_s: float
    """Since the epoch."""
    uss_bytes: int
    """Memory that only this process holds."""


class MemoryRecord:
    """Samples of the memory of the launcher, the lighthouse and the trainers."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        """By name and process; names of trainers begin with that of their replica."""

    def sample(self, job: JobView) -> None:
        """Record the memory of the processes that run now."""
        self._record("launcher", job.launcher)
        with suppress(FaultNotApplicable):
            self._record("lighthouse", job.lighthouse())
        for replica in range(job.num_replicas):
            with suppress(FaultNotApplicable):
                for rank in job.ranks(replica):
                    self._record(_trainer(replica), rank)

    def summary(self, job: JobView) -> Iterator[str]:
        """Yield a line for the launcher, the lighthouse, and the trainer of each replica that was
        sampled most often."""
        trainers = [_trainer(replica) for replica in range(job.num_replicas)]
        for name in ("launcher", "lighthouse", *trainers):
            of_name = [some for (whose, _), some in self._samples.items() if whose == name]
            samples = max(of_name, key=len, default=[])
            if not samples:
                continue
            first, last = samples[0].uss_bytes / _MIB, samples[-1].uss_bytes / _MIB
            line = f"{name}: USS {first:.1f} MiB at first, {last:.1f} MiB at last"
            if name in trainers:
                line += growth(samples, _quorum_times(job, trainers.index(name)))
            yield line

    def _record(self, name: str, process: psutil.Process) -> None:
        with suppress(psutil.Error):
            sample = Sample(time.time(), process.memory_full_info().uss)
            self._samples.setdefault((name, process.pid), []).append(sample)


def _trainer(replica: int) -> str:
    return f"trainer of replica {replica}"


def growth(samples: list[Sample], quorums_s: list[float]) -> str:
    """Describe the growth of a process per quorum change."""
    since_s = samples[0].taken_s
    changes = [sum(since_s < at_s <= one.taken_s for at_s in quorums_s) for one in samples]
    if len(set(changes)) < _MIN_SAMPLES:
        return f", {changes[-1]} quorum change{'' if changes[-1] == 1 else 's'}"
    uss_mib = [one.uss_bytes / _MIB for one in samples]
    slope = linear_regression(changes, uss_mib).slope
    return f", {slope:+.2f} MiB per quorum change over {changes[-1]} changes"


def _quorum_times(job: JobView, replica: int) -> list[float]:
    """Return when the quorum of a replica changed, since the epoch."""
    path = job.folder / f"replica_{replica:03d}" / METRICS
    with suppress(FileNotFoundError):
        lines = records(path.read_bytes().splitlines())
        return [one["time"] for one in lines if one.get("event") == "quorum"]
    return []
