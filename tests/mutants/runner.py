"""Runs mutants against the tests that reach them, each in a fork of a process that has imported the
libraries, and not the product."""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import psutil
import pytest

from tests.mutants.imports import install
from tests.mutants.sites import REPOSITORY, Site

SITE = Path(__file__).parent / "site"
_LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
    "pyarrow",
    "pydantic",
    "rich",
    "safetensors.torch",
    "tokenizers",
    "datasets",
    "transformers",
)
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    site: str
    operator: str
    outcome: str
    """killed, timeout, survived, unreached, or broken: the code does not run at all."""
    test: str = ""
    reason: str = ""
    num_tests: int = 0
    wall_s: float = 0.0
    includes_matrix: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether no test notices the mutant."""
        return self.outcome in ("survived", "unreached")


@dataclass(frozen=True)
class TestRecord:
    """A test, and the sites that it reaches."""

    __test__ = False

    name: str
    duration_s: float
    is_matrix: bool
    sites: frozenset[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def records_in(folder: Path) -> list[TestRecord]:
    """Read the records of all processes of a recording."""
    records = {}
    for path in sorted(folder.glob("tests-*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            records[found["test"]] = TestRecord(
                found["test"], found["duration_s"], found["is_matrix"], frozenset(found["sites"])
            )
    return list(records.values())


def tests_for(
    position: int, records: Sequence[TestRecord], tests_s: float = float("inf")
) -> list[TestRecord]:
    """Return the tests that reach a site, whole files one after the other, the cheapest first, as
    far as `tests_s` suffices, at least one."""
    by_file: dict[str, list[TestRecord]] = {}
    for record in records:
        if position in record.sites:
            by_file.setdefault(record.file, []).append(record)
    costs = {file: sum(one.duration_s for one in tests) for file, tests in by_file.items()}
    tests = [record for file in sorted(by_file, key=costs.__getitem__) for record in by_file[file]]
    ends_s = accumulate(test.duration_s for test in tests)
    return [
        test
        for n, (test, end_s) in enumerate(zip(tests, ends_s, strict=True))
        if n == 0 or end_s < tests_s
    ]


def run_all(
    sites: Sequence[tuple[int, Site]],
    records: Sequence[TestRecord],
    results: Path,
    *,
    jobs: int,
    budget_s: float,
    includes_matrix: bool,
    tests_s: float,
) -> None:
    """Run the mutants of `sites`, given with their positions in the recording, `jobs` at a time,
    and append an outcome each to `results`. No mutant is started after `budget_s`; each is run
    against tests of `tests_s`."""
    _import_libraries()
    started = time.monotonic()
    waiting = list(sites)
    running: list[_Run] = []
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() - started < budget_s:
            position, site = waiting.pop(0)
            tests = tests_for(position, records, tests_s)
            if tests:
                running.append(_Run(site, tests, results.parent, includes_matrix))
            else:
                outcome = Outcome(site.id, site.operator, "unreached")
                _append(results, site, outcome, includes_matrix)
        if not running:
            break
        for run in list(running):
            outcome = run.poll()
            if outcome is not None:
                running.remove(run)
                _append(results, run.site, outcome, includes_matrix)
        time.sleep(_POLL_S)


def _append(results: Path, site: Site, outcome: Outcome, includes_matrix: bool) -> None:
    values = {**asdict(outcome), "includes_matrix": includes_matrix}
    with results.open("a") as file:
        file.write(json.dumps(values) + "\n")
    print(f"{outcome.outcome:9} {outcome.wall_s:6.1f} s {site.operator:18} {site}", flush=True)


def outcomes_in(results: Path) -> dict[str, Outcome]:
    """Read the newest outcome of each site."""
    if not results.exists():
        return {}
    outcomes = (Outcome(**json.loads(line)) for line in results.read_text().splitlines())
    return {outcome.site: outcome for outcome in outcomes}


class _Run:
    """A process that runs tests with one mutant."""

    def __init__(
        self, site: Site, tests: Sequence[TestRecord], folder: Path, includes_matrix: bool
    ) -> None:
        self.site = site
        self._num_tests = len(tests)
        self._started = time.monotonic()
        runs = folder / "runs"
        runs.mkdir(exist_ok=True)
        self._outcome = runs / f"{site.id}.json"
        self._outcome.unlink(missing_ok=True)
        self._log = runs / f"{site.id}.log"
        durations_s = {test.name: test.duration_s for test in tests}
        self._outcome.with_suffix(".durations").write_text(json.dumps(durations_s))
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._run(site, [test.name for test in tests])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def poll(self) -> Outcome | None:
        """Return the outcome once there is one; end the process then."""
        pid, _ = os.waitpid(self._pid, os.WNOHANG)
        found = {}
        if self._outcome.exists():
            found = json.loads(self._outcome.read_text())
        is_late = time.monotonic() > found.get("deadline", self._started + 120)
        if pid == 0 and not is_late and "outcome" not in found:
            return None
        self._end(is_reaped=pid != 0)
        # A test that was running has ended the process; without one, the tests have not started.
        ended = "killed" if "test" in found else "broken"
        outcome = found.get("outcome") or ("timeout" if is_late else ended)
        return Outcome(
            self.site.id,
            self.site.operator,
            outcome,
            "" if outcome == "survived" else found.get("test", ""),
            found.get("reason", "" if outcome == "survived" else "the process ended"),
            self._num_tests,
            round(time.monotonic() - self._started, 1),
        )

    def _run(self, site: Site, tests: list[str]) -> None:
        os.setsid()
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(REPOSITORY)
        os.environ["MUTANT"] = f"{site.module}:{site.mutation}"
        os.environ["MUTANT_OUTCOME"] = str(self._outcome)
        os.environ["PYTHONPATH"] = search_path()
        sys.argv = ["pytest"]
        install()
        plugins = ["-p", "tests.mutants.killer", "-p", "no:xdist"]
        # Libraries that have plugins of pytest are imported already.
        quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        status = pytest.main(["-x", "-q", "--tb=short", *plugins, *quiet, *tests])
        sys.stdout.flush()
        os._exit(int(status))

    def _end(self, is_reaped: bool) -> None:
        """End the process and all that it has started."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self._pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not is_reaped:
            os.waitpid(self._pid, 0)


def search_path() -> str:
    """Return the PYTHONPATH with which each process imports mutants."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(SITE), str(REPOSITORY), *filter(None, [given])])


def _import_libraries() -> None:
    for library in _LIBRARIES:
        importlib.import_module(library)
