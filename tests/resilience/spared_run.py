"""A run with spares (`train --nproc N --spares K`), as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from torchtitan_lite.checkpoint.shared_memory import folder as shared
from torchtitan_lite.core.errors import CheckpointError

_RECOVERED_S = 60.0
"""Time limit for a recovery, which takes 2 s on an idle machine (`benchmarks/recovery.py`)."""
_SMALL = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.global_batch_size=8",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    "--checkpoint.ram_interval=1",
    "--metrics.log_freq=1",
    "--experimental.custom_import=tests.resilience.rank_faults",
)


class SparedRun:
    """A run with spares, as a user starts it."""

    def __init__(
        self, folder: Path, num_ranks: int, num_spares: int, *arguments: str, **faults: str
    ):
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.num_ranks = num_ranks
        self.arguments = (*_SMALL, f"--job.dump_folder={folder}", *arguments)
        command = [sys.executable, "-m", "torchtitan_lite", "train", f"--nproc={num_ranks}"]
        spares = [f"--spares={num_spares}"] if num_spares else []
        given = " ".join(f"{name}={value}" for name, value in faults.items())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *spares, *self.arguments],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RANK_FAULTS": given},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def children(self) -> set[int]:
        """Return the process ids of ranks and spares."""
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank whose checkpoint writer runs, which begins after its
        first step."""
        found = {}
        for pid in self.children():
            with suppress(psutil.NoSuchProcess):
                for writer in psutil.Process(pid).children():
                    match = re.search(r"rank-(\d+)\.snapshots", " ".join(writer.cmdline()))
                    if match:
                        found[int(match[1])] = pid
        return found

    def settled_ranks(self) -> dict[int, int]:
        """Return the process of each rank once all have taken a step."""
        launch.wait_until(lambda: len(self.ranks()) == self.num_ranks, 60)
        return self.ranks()

    def losses(self) -> dict[int, float]:
        """Return the loss of each recorded step."""
        return {line["step"]: line["loss"] for line in launch.steps_of(self.folder)}

    def shared_memory(self) -> list[Path]:
        """Return the files that the run holds in shared memory."""
        folder = shared.existing_run_folder((self.folder / "run_id").read_text().strip())
        return [] if folder is None else sorted(folder.iterdir())

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl."""
        return max((line["step"] for line in launch.steps_of(self.folder)), default=0)

    def wait_for_step(self, step: int) -> None:
        """Block until the run has taken `step`."""
        launch.wait_for_step(self.folder, step, self.process, self.log)

    def wait_for_spares(self, num_processes: int) -> None:
        """Block until there are so many processes, spares included, and those are warm."""
        launch.wait_until(lambda: len(self.children()) == num_processes, 60)
        spares = self.children() - set(self.ranks().values())
        # A spare starts no thread until it has imported everything.
        launch.wait_until(lambda: all(_is_on_standby(pid) for pid in spares), 60)

    def resumes(self) -> list[int]:
        """Return the steps at which the run has resumed."""
        return [one["step"] for one in launch.events_of(self.folder) if one["event"] == "resume"]

    def kill_rank(self, rank: int) -> float:
        """Kill a rank, and return the seconds until the run has resumed and taken a step."""
        before, step, resumes = self.ranks(), self.last_step(), len(self.resumes())
        assert len(before) == self.num_ranks
        os.kill(before[rank], signal.SIGKILL)
        started = time.monotonic()
        launch.wait_until(
            lambda: len(self.resumes()) > resumes or self.process.poll() is not None, _RECOVERED_S
        )
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        assert self.resumes()[-1] >= step - 1, "more than one step is repeated"
        self.wait_for_step(self.resumes()[-1] + 1)
        elapsed_s = time.monotonic() - started
        launch.wait_until(lambda: len(self.ranks()) == self.num_ranks, 60)
        return elapsed_s

    def final_tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Return the state at `step`, the last one, once the run has ended with each step recorded
        once."""
        assert self.process.wait(180) == 0, self.log.read_text()[-4000:]
        assert [line["step"] for line in launch.steps_of(self.folder)] == list(range(1, step + 1))
        return launch.saved_tensors(self.folder / "checkpoint" / f"step-{step}")

    def end(self) -> None:
        """Kill what still runs, and free the shared memory."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        known = self.folder / "run_id"
        deadline = time.monotonic() + 40
        while known.is_file() and time.monotonic() < deadline:
            try:
                shared.free_run(known.read_text().strip())
            except CheckpointError as error:
                if "No run" in str(error):
                    return
                time.sleep(0.2)
            else:
                return


def _is_on_standby(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess, IndexError):
        return psutil.Process(pid).num_threads() > 1 and psutil.Process(pid).cpu_percent(0.1) < 20
    return True
