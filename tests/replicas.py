"""Replicas of a run in real processes, with a lighthouse: each is what a user's torchrun starts."""

import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from torchft.coordination import LighthouseServer

from tests import launch
from torchtitan_lite.checkpoint.identity import run_id_of
from torchtitan_lite.checkpoint.memory.folder import free, runs
from torchtitan_lite.checkpoint.memory.lock import RankLock

HEARTBEAT_TIMEOUT_MS = 1500


class Replicas:
    """The replicas that were started, by number."""

    def __init__(self, folder: Path, num_ranks: int, arguments: Sequence[str], url: str) -> None:
        self.folder = folder
        self._num_ranks, self._arguments, self._url = num_ranks, arguments, url
        self._token = secrets.token_hex(16)
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Start one, or start it again."""
        own = [
            f"--job.dump_folder={self.folder}",
            "--fault_tolerance.enable=true",
            f"--fault_tolerance.replica_id={number}",
        ]
        self.running[number] = launch.start(
            self._num_ranks,
            [*self._arguments, *own],
            self.log(number),
            TORCHFT_LIGHTHOUSE=self._url,
            TORCHTITAN_LITE_TOKEN=self._token,
        )

    def log(self, number: int) -> Path:
        return self.folder / f"replica_{number}.log"

    def output(self, number: int) -> Path:
        """The folder of what a replica says of itself."""
        return self.folder / f"replica_{number:03d}"

    def steps(self, number: int) -> list[dict[str, Any]]:
        """The committed steps that a replica has told of."""
        return [step for step in launch.steps_of(self.output(number)) if not step["skipped"]]

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
        process = self.running[number]
        doomed = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        for one in doomed:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()

    def stop(self) -> None:
        """Ask all to leave."""
        for process in self.running.values():
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
            own = {run_id_of(run_id, number) for number in made.running}
            for left in runs():
                if left.run_id in own:
                    for rank in left.ranks:
                        RankLock(left.path, rank).wait(20)
                    free(left.run_id)
