"""The supervisor: starts trainer and sampler, and restarts either when it dies.
`python -m examples.online_rl [--steps N] [--out FOLDER]`"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from examples.online_rl.rollouts import Rollouts, read_rollouts
from examples.online_rl.task import decode
from torchtitan_lite.core.rank.processes import spawn

_REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_MAX_RESTARTS = 5
"""Restarts of a job in a row without new rollouts."""
_STOP_S = 60.0
_ROLLOUTS_APART = 104
"""Between two answers that are shown: one of every 13 prompts."""


def main() -> int:
    """Run both jobs until the trainer has finished. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.online_rl")
    parser.add_argument("--steps", type=int, default=300, help="steps of the trainer")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/online_rl"), help="output folder of the run"
    )
    options = parser.parse_args()
    out = options.out.absolute()
    rollouts = out / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    config = Path(__file__).with_name("trainer.toml")
    trainer = Job(
        "trainer",
        ["torchtitan_lite", "train", "--config", str(config), "--job.dump_folder", str(out),
         "--training.dataset_path", str(rollouts), "--training.steps", str(options.steps)],
        out / "trainer.log",
    )  # fmt: skip
    sampler = Job(
        "sampler", ["examples.online_rl.sampler", str(out), str(rollouts)], out / "sampler.log"
    )
    try:
        status = _run(trainer, sampler, rollouts)
    except KeyboardInterrupt:
        # The sampler still runs: the trainer may be waiting for it.
        trainer.stop()
        print("Stopped; the same command resumes.")
        return 130
    finally:
        trainer.kill()
        sampler.kill()
    if status == 0:
        _print_summary(rollouts, options.steps, trainer.num_restarts, sampler.num_restarts)
    return status


@dataclass
class Job:
    """A process that is restarted when it dies; its output is appended to a file."""

    name: str
    module: list[str]
    """Module and arguments."""
    log: Path
    num_restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _shown: int = 0
    """Bytes of the log that have been read."""
    _restarts_in_a_row: int = 0
    _progress: int = -1
    """Number of rollouts at the last restart."""
    _environment: dict[str, str] = field(
        # Two cores for two jobs.
        default_factory=lambda: {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    )

    def start(self) -> None:
        """Start the process, which dies with this one."""
        environment = self._environment
        paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._shown = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = spawn(
                [sys.executable, "-m", *self.module], environment, stdout=log.fileno()
            )

    def exit_status(self) -> int | None:
        """Return the exit status; None while the process runs."""
        assert self._process is not None
        return self._process.poll()

    def restart(self, progress: int) -> bool:
        """Start the process again, unless it has died too often without `progress`."""
        self._restarts_in_a_row = 0 if progress > self._progress else self._restarts_in_a_row
        self._progress = progress
        status = self.exit_status()
        cause = f"signal {-status}" if status and status < 0 else f"exit status {status}"
        if self._restarts_in_a_row >= _MAX_RESTARTS:
            print(f"{self.name} ended with {cause} again, without progress: see {self.log}")
            return False
        print(f"{self.name} ended with {cause}: restarting it", flush=True)
        self._restarts_in_a_row += 1
        self.num_restarts += 1
        self.start()
        return True

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines that the process has written since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._shown)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._shown += len(text)
        yield from text.decode(errors="replace").splitlines()

    def stop(self) -> None:
        """Ask the process to save and end, and wait for it."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)

    def kill(self) -> None:
        """End the process now, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _run(trainer: Job, sampler: Job, rollouts: Path) -> int:
    """Supervise both jobs. Returns 0 once the trainer has finished, 1 if a job cannot run."""
    trainer.start()
    sampler.start()
    while True:
        status = trainer.exit_status()
        for line in trainer.new_lines():
            if line.startswith("rollouts "):
                print(line, flush=True)
        if status == 0:
            return 0
        for job in (trainer, sampler):
            if job.exit_status() is not None and not job.restart(len(_versions(rollouts))):
                return 1
        time.sleep(_POLL_S)


def _versions(rollouts: Path) -> list[int]:
    """Return the versions of which there are rollouts, in order."""
    return sorted(int(path.stem.removeprefix("version-")) for path in rollouts.glob("*.json"))


def _print_summary(rollouts: Path, steps: int, trainer: int, sampler: int) -> None:
    """Print the rewards at the start and at the end, and answers to some prompts."""
    first, last = read_rollouts(rollouts, 0), read_rollouts(rollouts, steps - 1)
    print(
        f"reward {first.mean_reward:.3f} with the initial weights, {last.mean_reward:.3f} in step "
        f"{steps}, with {last.fraction_right:.0%} of the answers right; restarts: {trainer} of the "
        f"trainer, {sampler} of the sampler"
    )
    print("  ".join(_examples(last)))


def _examples(rollouts: Rollouts) -> Iterator[str]:
    for row in rollouts.tokens[::_ROLLOUTS_APART]:
        yield decode(row).removesuffix("<end>")


if __name__ == "__main__":
    sys.exit(main())
