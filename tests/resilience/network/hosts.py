"""Replicas and lighthouses, each on a host of its own, and what a fault of the network costs."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.comparison import (
    newest_checkpoint_step,
    sample_differences,
    state_differences,
    step_differences,
    undisturbed_run,
)
from tests.chaos.job_view import CommittedStep, committed_steps
from tests.harness.ranks import REPOSITORY
from tests.harness.replicas import ENDLESS, Replicas
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.network.namespaces import Network
from torchtitan_lite.core.outputs import METRICS
from torchtitan_lite.fault_tolerance.supervision.logs import records

ARGUMENTS: tuple[str, ...] = (
    *ENDLESS,
    # Three rounds, which two replicas cannot split evenly.
    "--training.global_batch_size=6",
    # AdamW amplifies differences of rounding, and more with a higher learning rate.
    "--optimizer.lr=0.0004",
    # A run of some minutes has thousands of steps.
    "--checkpoint.interval=50",
    # The time after which a cut that no side is notified of is noticed.
    "--fault_tolerance.process_group_timeout_ms=5000",
)
_PORT = 29510
_JOIN_TIMEOUT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 1500
_RECOVERY_S = 60.0
"""How long a test waits for a recovery. Longer than the goal, so that a failure has a figure."""


def replica(number: int) -> str:
    """Return the name of a replica's host."""
    return f"replica{number}"


def lighthouse(number: int) -> str:
    """Return the name of a lighthouse's host."""
    return f"lighthouse{number}"


@contextmanager
def network_replicas(
    folder: Path, num_replicas: int, num_lighthouses: int = 1
) -> "Iterator[NetworkReplicas]":
    """Start lighthouses for replicas on hosts of their own: replica N uses lighthouse N modulo
    their number. On exit, all processes, shared memory and namespaces are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [lighthouse(number) for number in range(num_lighthouses)]
    names += [replica(number) for number in range(num_replicas)]
    with Network(names) as network:
        run = NetworkReplicas(folder, network, num_replicas, num_lighthouses)
        try:
            run.start_lighthouses()
            yield run
        finally:
            run.remove()


class NetworkReplicas(Replicas):
    """The replicas of a run, each on its own host."""

    def __init__(
        self, folder: Path, network: Network, num_replicas: int, num_lighthouses: int
    ) -> None:
        super().__init__(folder, 1, ARGUMENTS, "", secrets.token_hex(16))
        self.network = network
        self._num_replicas, self._num_lighthouses = num_replicas, num_lighthouses
        self.lighthouses: list[subprocess.Popen[bytes]] = []
        self.lighthouse_of: dict[int, int] = {}
        """Lighthouses of replicas, where they differ from the replica's number."""
        self.hostnames: dict[int, str] = {}
        """Host names of replicas, where they differ from those of their hosts."""

    def prefix(self, number: int) -> Sequence[str]:
        return self.network.command(replica(number), self.hostnames.get(number))

    def lighthouse_url(self, number: int) -> str:
        host = lighthouse(self.lighthouse_of.get(number, number) % self._num_lighthouses)
        return f"http://{self.network.address(host)}:{_PORT}"

    def start_lighthouses(self) -> None:
        for number in range(self._num_lighthouses):
            name = lighthouse(number)
            with (self.folder / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [*self.network.command(name), sys.executable,
                     "-m", "torchtitan_lite", "coordinator",
                     f"--bind={self.network.address(name)}:{_PORT}",
                     f"--join-timeout-ms={_JOIN_TIMEOUT_MS}",
                     f"--heartbeat-timeout-ms={_HEARTBEAT_TIMEOUT_MS}"],
                    cwd=REPOSITORY,
                    env={**os.environ, "TORCHTITAN_LITE_TOKEN": self.token},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
            self.lighthouses.append(process)

    def train_until_all_participate(self, step: int = 5, more: Sequence[str] = ()) -> None:
        """Start all replicas, with additional arguments, and block until all have taken a step
        together, from this step on."""
        numbers = range(self._num_replicas)
        for number in numbers:
            self.start(number, *more)
        deadline_s = time.monotonic() + 120
        while not all(self._together(number, 0.0, step) for number in numbers):
            self.check_alive()
            assert time.monotonic() < deadline_s, self.report()
            time.sleep(0.05)

    def wait_until_together(self, since: float) -> float:
        """Block until each replica has taken a step with all others after the Unix time `since`,
        and return the time after it until the last one did, in seconds."""
        deadline_s = time.monotonic() + _RECOVERY_S
        while True:
            ends = [self._together(number, since, 0) for number in self.running]
            if all(ends):
                return max(filter(None, ends)) - since
            self.check_alive()
            assert time.monotonic() < deadline_s, (
                f"not all replicas train together {_RECOVERY_S:.0f} s after the fault has ended:\n"
                f"{self.report()}"
            )
            time.sleep(0.05)

    def longest_pause_s(self, number: int, since: float, until: float) -> float:
        """Return the longest time without a committed step of a replica, between two Unix
        times."""
        ends = [step["time"] for step in self.steps(number) if since <= step["time"] <= until]
        return max(later - end for end, later in zip([since, *ends], [*ends, until], strict=True))

    def check_alive(self) -> None:
        """Check that no process has ended."""
        ended = [number for number, one in self.running.items() if one.poll() is not None]
        assert not ended, f"replicas {ended} have ended:\n{self.report()}"
        assert all(one.poll() is None for one in self.lighthouses), "a lighthouse has ended"

    def report(self) -> str:
        """Describe each replica: its exit status, its last step, and the end of its log."""
        now = time.time()
        parts = []
        for number, process in self.running.items():
            status = process.poll()
            state = "running" if status is None else f"exit status {status}"
            for last in self.steps(number)[-1:]:
                age_s = now - last["time"]
                state += (
                    f", step {last['step']} of {last['num_replicas']} replicas {age_s:.1f} s ago"
                )
            parts.append(f"replica {number}: {state}\n{self.text(number)[-1500:]}")
        return "\n".join(parts)

    def check_against_undisturbed_run(self, folder: Path) -> None:
        """Stop all replicas, and compare losses, samples and the final state with a run without
        faults in one process."""
        self.stop()
        for number in self.running:
            assert self.wait(number) == 0, self.report()
        last = newest_checkpoint_step(self.folder)
        undisturbed = undisturbed_run(
            [*ARGUMENTS, "--fault_tolerance.enable=false"], folder / "undisturbed", last
        )
        taken = [step for number in self.running for step in self._committed(number)]
        assert step_differences(taken, undisturbed, FAULTS_FLOAT64) == []
        # No process was killed, so no record is missing.
        assert sample_differences(self.folder, folder / "undisturbed") == []
        problems, _ = state_differences(self.folder, folder / "undisturbed", last, FAULTS_FLOAT64)
        assert problems == []

    def remove(self) -> None:
        super().remove()
        for process in self.lighthouses:
            process.kill()
            process.wait()

    def _committed(self, number: int) -> list[CommittedStep]:
        lines = (self.output(number) / METRICS).read_bytes().splitlines()
        return list(committed_steps(number, records(lines)))

    def _together(self, number: int, since: float, step: int) -> float | None:
        """Return the end of the first step with all replicas that began after `since`, as a Unix
        time; None if there is none."""
        return next(
            (
                record["time"]
                for record in self.steps(number)
                if record["time"] - record["step_time_s"] > since
                and record["step"] >= step
                and record["num_replicas"] == len(self.running)
            ),
            None,
        )
