"""Score the diagnosis of seeded faults in running jobs.

python -m tests.diagnosis --faults 100 --seed 1 --results results.jsonl [--kinds "slow link"]
python -m tests.diagnosis --undisturbed SECONDS
python -m tests.diagnosis --table results.jsonl

Jobs of 4 ranks and of 2 replicas run under the launcher with the configuration that
docs/fault_tolerance.md recommends for diagnosis. Faults are injected one after the other; each is
scored by what the job has written about it. Results are appended to a JSON Lines file, and faults
that it has already are skipped, so that an interrupted run continues. The exit status is 0 if at
least 95 % of the faults were diagnosed right, and 1 if not. Needs root for faults of links.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.job_view import FaultNotApplicable
from tests.diagnosis.faults import KINDS, Kind, Target
from tests.diagnosis.running_job import MESHES, JobFailed, JobMesh, RunningJob
from tests.diagnosis.scorer import judge
from tests.diagnosis.table import markdown_table, share_right
from tests.diagnosis.undisturbed import false_alarms

_GOAL = 0.95
_STEPS_BETWEEN = 10
_SETTLE_S = 1.5
"""Time for further diagnoses, which may be wrong, after the first."""


@dataclass(frozen=True)
class DrawnFault:
    """A fault of a seed: its place in the draw, its kind, and its target."""

    index: int
    kind: Kind
    mesh: JobMesh
    replica: int
    rank: int


def draw(kinds: Sequence[Kind], number: int, seed: int) -> list[DrawnFault]:
    """Draw faults, each kind equally often. They are in the order of their meshes, because a job
    serves many faults."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < number:
        for kind in rng.sample(list(kinds), len(kinds)):
            mesh = MESHES[rng.choice(kind.meshes)]
            replica, rank = rng.randrange(mesh.replicas), rng.randrange(mesh.ranks)
            drawn.append(DrawnFault(len(drawn), kind, mesh, replica, rank))
    return sorted(drawn[:number], key=lambda fault: (fault.mesh.name, fault.index))


def run_faults(faults: Sequence[DrawnFault], seed: int, folder: Path, results: Path) -> None:
    """Inject `faults`, and append the results."""
    for mesh, of_mesh in groupby(faults, key=lambda fault: fault.mesh):
        waiting = list(of_mesh)
        attempt = 0
        while waiting:
            attempt += 1
            place = folder / f"{mesh.name.replace(' ', '-')}-{waiting[0].index}-{attempt}"
            with RunningJob(mesh, place) as job:
                waiting = _run_in_job(job, waiting, seed, results)


def _run_in_job(
    job: RunningJob, faults: Sequence[DrawnFault], seed: int, results: Path
) -> list[DrawnFault]:
    """Inject faults until the job has ended; return those that are left."""
    for place, fault in enumerate(faults):
        try:
            job.wait_until_ready(_STEPS_BETWEEN)
        except JobFailed as error:
            if not place:
                raise
            print(error, file=sys.stderr)
            return list(faults[place:])
        result = _run_fault(job, fault, seed)
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(_line(result), flush=True)
        if job.has_ended or fault.kind.ends_replica:
            return list(faults[place + 1 :])
    return []


def _run_fault(job: RunningJob, fault: DrawnFault, seed: int) -> dict[str, Any]:
    """Inject one fault, and return its result."""
    rng = random.Random(f"{seed} {fault.index}")
    time.sleep(rng.uniform(0, 1))
    said = job.diagnoses.read()
    before = [f"said before the fault: {_text(one)}" for one in said]
    started_s, said = time.monotonic(), []
    target = Target(job, fault.replica, fault.rank, rng)
    verdict, reason = "not injected", ""
    try:
        with fault.kind.inject(target):
            job.wait_for(lambda: said.extend(job.diagnoses.read()) or said, fault.kind.timeout_s)
            seconds = time.monotonic() - started_s
            time.sleep(_SETTLE_S)
            said += job.diagnoses.read()
        verdict = judge(fault.kind.answer(fault.replica, fault.rank, fault.mesh.name), said).value
    except (FaultNotApplicable, psutil.NoSuchProcess) as error:
        seconds, reason = 0.0, str(error)
    return {
        "seed": seed,
        "index": fault.index,
        "kind": fault.kind.name,
        "mesh": fault.mesh.name,
        "replica": fault.replica,
        "rank": fault.rank,
        "verdict": verdict,
        "seconds": round(seconds, 1),
        "evidence": [*map(_text, said)] or [reason],
        "before": before,
    }


def _text(said: dict[str, Any]) -> str:
    where = f"replica {said['replica']}, rank {said['rank']}, {said['process']}"
    return f"{said['cause']}: {where}: {said['text']}"


def _line(result: dict[str, Any]) -> str:
    where = f"{result['mesh']}, replica {result['replica']}, rank {result['rank']}"
    said = "; ".join([*result["evidence"], *result["before"]])[:300]
    return (
        f"{result['index']:4} {result['verdict']:12} {result['kind']:28} {where} "
        f"{result['seconds']:.1f} s: {said}"
    )


def _done(results: Path, seed: int) -> Iterator[dict[str, Any]]:
    if results.exists():
        found = map(json.loads, results.read_text().splitlines())
        yield from (one for one in found if one["seed"] == seed)


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(argv)
    if options.table:
        found = [json.loads(line) for line in options.table.read_text().splitlines()]
        print(markdown_table(found))
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="diagnosis-"))
    if options.undisturbed:
        alarms = false_alarms(folder, options.undisturbed)
        print("\n".join(alarms) or "no false alarm")
        return 1 if alarms else 0
    kinds = [KINDS[name] for name in options.kinds or KINDS]
    done = {one["index"] for one in _done(options.results, options.seed)}
    faults = draw(kinds, options.faults, options.seed)
    meshes = options.meshes or list(MESHES)
    waiting = [one for one in faults if one.index not in done and one.mesh.name in meshes]
    run_faults(waiting, options.seed, folder, options.results)
    found = list(_done(options.results, options.seed))
    print(markdown_table(found))
    if options.folder is None:
        shutil.rmtree(folder)
    return 0 if share_right(found) >= _GOAL else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.diagnosis",
        description="Score the diagnosis of seeded faults in running jobs.",
        allow_abbrev=False,
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--faults", type=int, default=100, help="number of faults (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    parser.add_argument("--kinds", type=names, default=[], help="comma-separated (default: all)")
    parser.add_argument("--meshes", type=names, default=[], help="comma-separated (default: all)")
    parser.add_argument(
        "--results", type=Path, default=Path("diagnosis.jsonl"), help="results, continued"
    )
    parser.add_argument("--folder", type=Path, help="folder for the outputs of the jobs, kept")
    parser.add_argument(
        "--undisturbed", type=float, metavar="SECONDS", help="run jobs without faults, beside load"
    )
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="print the table of results")
    return parser


if __name__ == "__main__":
    # So that the jobs end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
