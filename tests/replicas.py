"""Replicas of a run in real processes, with a lighthouse: each is what a user's torchrun starts."""

import json
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchft.coordination import LighthouseServer

from tests import launch
from tests.tolerances import FAULTS_FLOAT64
from torchtitan_lite.checkpoint.memory.folder import RankLock, free_run, list_runs
from torchtitan_lite.checkpoint.save_context import replica_run_id

HEARTBEAT_TIMEOUT_MS = 1500
ENDLESS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.seq_len=64",
    "--metrics.log_freq=1",
    "--debug.sample_ledger=true",
    "--training.steps=100000",
    "--checkpoint.interval=5",
    "--fault_tolerance.process_group_timeout_ms=20000",
)
"""A run that lasts until it is stopped, and can be compared with a straight one."""


class Replicas:
    """The replicas that were started, by number."""

    def __init__(self, folder: Path, num_ranks: int, arguments: Sequence[str], url: str) -> None:
        self.folder = folder
        self._num_ranks, self._arguments, self._url = num_ranks, arguments, url
        self._token = secrets.token_hex(16)
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, number: int, *more: str, faults: str = "", num_ranks: int | None = None
    ) -> None:
        """Start one, or start it again, with `more` arguments than the others have, and `faults` as
        `tests.faulty_trainer` reads them."""
        own = [
            f"--job.dump_folder={self.folder}",
            "--fault_tolerance.enable=true",
            f"--fault_tolerance.replica_id={number}",
        ]
        self.running[number] = launch.start(
            num_ranks or self._num_ranks,
            [*self._arguments, *own, *more],
            self.log(number),
            program=launch.FAULTY if faults else launch.PROGRAM,
            FAULTS=faults,
            TORCHFT_LIGHTHOUSE=self._url,
            TORCHTITAN_LITE_TOKEN=self._token,
        )

    def start_together(self, faults: Mapping[int, str]) -> None:
        """Start those with these faults, so that all are there from the first steps on."""
        for number, own in faults.items():
            self.start(number, faults=f"comes_late={self._go(number)} {own}")
        for number in faults:
            self.wait_until_ready(number)
        for number in faults:
            self.let_go(number)

    def wait_until_ready(self, number: int) -> None:
        """Until one that `comes_late` would join the others."""
        self._wait_for_file(number, self._go(number).with_suffix(".waits"))

    def halt(self, number: int, file: Path) -> None:
        """Let one that `halts` at this file do so, within a step that the others take with it."""
        file.touch()
        self._wait_for_file(number, file.with_suffix(".halted"))

    def _wait_for_file(self, number: int, file: Path) -> None:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert self.running[number].poll() is None, self.text(number)
            assert time.monotonic() < deadline, self.text(number)
            time.sleep(0.02)

    def let_go(self, number: int) -> None:
        """Let it."""
        self._go(number).touch()

    def _go(self, number: int) -> Path:
        return self.folder / f"go_{number}"

    def log(self, number: int) -> Path:
        return self.folder / f"replica_{number}.log"

    def output(self, number: int) -> Path:
        """The folder of what a replica says of itself."""
        return self.folder / f"replica_{number:03d}"

    def steps(self, number: int) -> list[dict[str, Any]]:
        """The committed steps that a replica has told of."""
        return [step for step in launch.steps_of(self.output(number)) if not step["skipped"]]

    def losses(self, number: int) -> dict[int, float]:
        """Of those, by step."""
        return {step["step"]: step["loss"] for step in self.steps(number)}

    def events(self, number: int) -> list[str]:
        """The names of what has happened to a replica."""
        return [event["event"] for event in launch.events_of(self.output(number))]

    def wait_for_step(self, number: int, step: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(told["step"] >= step for told in self.steps(number)):
            assert self.running[number].poll() is None, self.text(number)
            assert time.monotonic() < deadline, self.text(number)
            time.sleep(0.02)

    def text(self, number: int) -> str:
        """The end of a replica's log."""
        return self.log(number).read_text(errors="replace")[-6000:]

    def kill(self, number: int) -> None:
        """As a machine that is lost: all processes of a replica at once, writers included."""
        for one in self._processes(number):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.running[number].wait()

    def suspend(self, number: int) -> None:
        """Stop all processes of a replica."""
        for one in self._processes(number):
            with suppress(psutil.NoSuchProcess):
                one.suspend()

    def _processes(self, number: int) -> list[psutil.Process]:
        first = psutil.Process(self.running[number].pid)
        return [first, *first.children(recursive=True)]

    def stop(self) -> None:
        """Ask all to leave."""
        for process in self.running.values():
            if process.poll() is not None:
                continue
            # Without torchrun the process is the rank.
            for rank in launch.ranks_of(process) or [psutil.Process(process.pid)]:
                rank.terminate()

    def wait(self, number: int, timeout_s: float = 120) -> int:
        return self.running[number].wait(timeout=timeout_s)


@contextmanager
def replicas(folder: Path, num_ranks: int, arguments: Sequence[str]) -> Iterator[Replicas]:
    """A lighthouse, and replicas of `num_ranks` processes that find each other by it; in the end
    nothing of them is left."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    folder.mkdir(parents=True, exist_ok=True)
    port = lighthouse.address().rpartition(":")[2]
    made = Replicas(folder, num_ranks, arguments, f"http://127.0.0.1:{port}")
    try:
        yield made
    finally:
        for number, process in made.running.items():
            if process.poll() is None:
                made.kill(number)
        lighthouse.shutdown()
        if (folder / "run_id").exists():
            run_id = (folder / "run_id").read_text().strip()
            own = {replica_run_id(run_id, number) for number in made.running}
            for left in list_runs():
                if left.run_id in own:
                    for rank in left.ranks:
                        RankLock(left.path, rank).wait(20)
                    free_run(left.run_id)


def check_against_a_straight_run(
    run: Replicas,
    num_ranks: int,
    arguments: Sequence[str],
    tmp_path: Path,
    *,
    faults: str = "",
    num_incomplete: int = 1,
) -> None:
    """The losses of all replicas are those of a run that nothing has disturbed, but for `faults`
    of the data; each sample was used in its step, but in `num_incomplete` of them at most: who is
    killed may have committed a step and not written down what it used."""
    told = [run.losses(number) for number in run.running]
    last = max(step for losses in told for step in losses)
    straight = tmp_path / "straight"
    own = [f"--job.dump_folder={straight}", f"--training.steps={last}"]
    own += ["--checkpoint.enable=false", "--fault_tolerance.replay_check=false"]
    program = launch.FAULTY if faults else launch.PROGRAM
    log = tmp_path / "straight.log"
    launch.run(num_ranks, [*arguments, *own], log, program=program, FAULTS=faults)
    steps = launch.steps_of(straight)
    expected = {step["step"]: step["loss"] for step in steps if not step["skipped"]}
    for losses in told:
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=FAULTS_FLOAT64), step
    used = _samples(run.folder.glob("replica_*/samples_rank_*.jsonl"))
    in_order = _samples(straight.glob("samples_rank_*.jsonl"))
    assert all(samples <= in_order[step] for step, samples in used.items())
    incomplete = [step for step, samples in used.items() if samples != in_order[step]]
    assert len(incomplete) <= num_incomplete, incomplete


def _samples(ledgers: Iterable[Path]) -> dict[int, set[int]]:
    """Step -> the samples of all ranks that share no sample, as they used them."""
    found: dict[int, set[int]] = {}
    for path in ledgers:
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["step"], set()).update(told["samples"])
    return found
