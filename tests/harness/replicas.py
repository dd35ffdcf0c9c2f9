"""Replicas in real processes, started as by a user's torchrun, and a lighthouse."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import launch
from tests.harness.tolerances import FAULTS_FLOAT64
from torchtitan_lite.checkpoint.history.identity import replica_run_id
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock, free_run, list_runs
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService
from torchtitan_lite.tools.report import check_samples

HEARTBEAT_TIMEOUT_MS = 2500
_SLOW = "slow=0.05"
"""Keeps a replica from taking hundreds of steps while another starts."""
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
"""Arguments of a run that trains until it is stopped, for comparison with an undisturbed run."""


class Replicas:
    """The replicas of a run, by number."""

    def __init__(
        self, folder: Path, num_ranks: int, arguments: Sequence[str], url: str, secret: str
    ) -> None:
        self.folder = folder
        self._num_ranks, self._arguments, self._url = num_ranks, arguments, url
        self.token = secret
        self.running: dict[int, launch.Process] = {}

    def start(
        self, number: int, *more: str, faults: str = "", num_ranks: int | None = None
    ) -> None:
        """Start or restart a replica with additional arguments, and with `faults` as
        `tests.harness.faulty_trainer` reads them."""
        own = [
            f"--job.dump_folder={self.folder}",
            "--fault_tolerance.enable=true",
            f"--fault_tolerance.replica_id={number}",
        ]
        self.running[number] = launch.start(
            num_ranks or self._num_ranks,
            [*self._arguments, *own, *more],
            self.log(number),
            program=launch.FAULTY_PROGRAM if faults else launch.PROGRAM,
            FAULTS=faults,
            prefix=self.prefix(number),
            TORCHFT_LIGHTHOUSE=self.lighthouse_url(number),
            TORCHTITAN_LITE_TOKEN=self.token,
        )

    def prefix(self, number: int) -> Sequence[str]:
        """Return the start of a replica's command line."""
        del number
        return ()

    def lighthouse_url(self, number: int) -> str:
        """Return the URL of a replica's lighthouse."""
        del number
        return self._url

    def start_together(self, faults: Mapping[int, str]) -> None:
        """Start the replicas with these faults, so that all train together from the first step."""
        for number, own in faults.items():
            self.start(number, faults=f"delayed_join={self._join_file(number)} {own}")
        for number in faults:
            self.wait_until_ready(number)
        for number in faults:
            self.release(number)

    def wait_until_ready(self, number: int) -> None:
        """Block until a replica with the fault `delayed_join` is ready to join the others."""
        self._wait_for_file(number, self._join_file(number).with_suffix(".waits"))

    def block(self, number: int, file: Path) -> None:
        """Block a replica with the fault `blocked_by` this file within a step that it takes with
        the others."""
        file.touch()
        self._wait_for_file(number, file.with_suffix(".blocked"))

    def _wait_for_file(self, number: int, file: Path) -> None:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert self.running[number].poll() is None, self.text(number)
            assert time.monotonic() < deadline, self.text(number)
            time.sleep(0.02)

    def release(self, number: int) -> None:
        """Let a replica with the fault `delayed_join` join."""
        self._join_file(number).touch()

    def _join_file(self, number: int) -> Path:
        return self.folder / f"join_{number}"

    def log(self, number: int) -> Path:
        return self.folder / f"replica_{number}.log"

    def output(self, number: int) -> Path:
        """Return the folder of a replica's metrics."""
        return self.folder / f"replica_{number:03d}"

    def steps(self, number: int) -> list[dict[str, Any]]:
        """Return the committed steps that a replica recorded."""
        return [step for step in launch.steps_of(self.output(number)) if not step["skipped"]]

    def losses(self, number: int) -> dict[int, float]:
        """Return the losses of the committed steps, by step."""
        return {step["step"]: step["loss"] for step in self.steps(number)}

    def events(self, number: int) -> list[str]:
        """Return the names of a replica's events."""
        return [event["event"] for event in launch.events_of(self.output(number))]

    def wait_for_step(self, number: int, step: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(record["step"] >= step for record in self.steps(number)):
            assert self.running[number].poll() is None, self.text(number)
            assert time.monotonic() < deadline, self.text(number)
            time.sleep(0.02)

    def text(self, number: int) -> str:
        """Return the end of a replica's log."""
        return self.log(number).read_text(errors="replace")[-6000:]

    def kill(self, number: int) -> None:
        """Kill all processes of a replica at once, writers included, as when a machine is lost."""
        for process in self._processes(number):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.running[number].wait()

    def suspend(self, number: int) -> None:
        """Suspend all processes of a replica."""
        for process in self._processes(number):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self, pid: int) -> None:
        """Resume a suspended process and its descendants."""
        first = psutil.Process(pid)
        for process in [*first.children(recursive=True), first]:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _processes(self, number: int) -> list[psutil.Process]:
        first = psutil.Process(self.running[number].pid)
        return [first, *first.children(recursive=True)]

    def stop(self) -> None:
        """Send SIGTERM to all ranks."""
        for process in self.running.values():
            if process.poll() is not None:
                continue
            # Without torchrun the process is the rank.
            for rank in launch.ranks_of(process) or [psutil.Process(process.pid)]:
                rank.terminate()

    def wait(self, number: int, timeout_s: float = 120) -> int:
        return self.running[number].wait(timeout=timeout_s)

    def remove(self) -> None:
        """Kill all processes, and remove the shared memory of the run."""
        for number, process in self.running.items():
            if process.poll() is None:
                self.kill(number)
        if (self.folder / "run_id").exists():
            run_id = (self.folder / "run_id").read_text().strip()
            own = {replica_run_id(run_id, number) for number in self.running}
            for existing in list_runs():
                if existing.run_id in own:
                    for kind, rank in existing.owners:
                        RankLock(existing.path, rank, kind).wait(20)
                    free_run(existing.run_id)


@contextmanager
def replicas(folder: Path, num_ranks: int, arguments: Sequence[str]) -> Iterator[Replicas]:
    """Start a lighthouse for replicas of `num_ranks` processes. On exit, all processes and shared
    memory are removed."""
    secret = secrets.token_hex(16)
    settings = QuorumSettings(
        min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
    )
    lighthouse = LighthouseService("127.0.0.1:0", settings, secret).start()
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://{lighthouse.address}"
    started = Replicas(folder, num_ranks, arguments, url, secret)
    try:
        yield started
    finally:
        started.remove()
        lighthouse.stop()


def kill_and_restart(run: Replicas, halt: Path) -> None:
    """Start two replicas, kill one in a step, which it enters once the file `halt` exists, restart
    it, and stop the run once both have trained together again."""
    run.start(0, faults=_SLOW)
    run.start(1, faults=f"{_SLOW} blocked_by={halt}")
    run.wait_for_step(0, 4)
    run.wait_for_step(1, 4)
    # Killed between two steps, it would cost the other replica nothing.
    run.block(1, halt)
    run.kill(1)
    run.wait_for_step(0, run.steps(0)[-1]["step"] + 3)
    assert run.steps(0)[-1]["num_replicas"] == 1
    run.start(1, faults=_SLOW)
    returned = run.steps(0)[-1]["step"]
    while run.steps(0)[-1]["num_replicas"] == 1:
        run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
    run.wait_for_step(1, max(returned, run.steps(0)[-1]["step"]) + 3)
    run.stop()
    assert [run.wait(number) for number in run.running] == [0, 0]


def check_against_undisturbed_run(
    run: Replicas,
    num_ranks: int,
    arguments: Sequence[str],
    tmp_path: Path,
    *,
    faults: str = "",
) -> None:
    """Check that the losses of all replicas equal those of an undisturbed run, which has only the
    `faults` in its data, and that each step used its samples, by the ledgers alone."""
    actual = [run.losses(number) for number in run.running]
    last = max(step for losses in actual for step in losses)
    undisturbed = tmp_path / "undisturbed"
    own = [f"--job.dump_folder={undisturbed}", f"--training.steps={last}"]
    own += ["--checkpoint.enable=false", "--fault_tolerance.replay_check=false"]
    program = launch.FAULTY_PROGRAM if faults else launch.PROGRAM
    log = tmp_path / "undisturbed.log"
    launch.run(num_ranks, [*arguments, *own], log, program=program, FAULTS=faults)
    steps = launch.steps_of(undisturbed)
    expected = {step["step"]: step["loss"] for step in steps if not step["skipped"]}
    for losses in actual:
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=FAULTS_FLOAT64), step
    checked = check_samples(run.folder)
    assert checked.problems == [], checked.summary()
    expected_samples = check_samples(undisturbed).samples
    for step, used in checked.samples.items():
        assert used == expected_samples.get(step, used), step
