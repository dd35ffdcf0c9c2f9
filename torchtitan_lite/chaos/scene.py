"""The processes and files of a run under the launcher, as one who disturbs it finds them.

Invariant: only processes that descend from the launcher that was started here are named. Layer:
above launcher and checkpoint.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from torchtitan_lite.checkpoint import replica_run_id
from torchtitan_lite.checkpoint.memory import SHARED_MEMORY, region_files
from torchtitan_lite.checkpoint.storage import parse_step_name
from torchtitan_lite.launcher.processes import is_writer

_Found = TypeVar("_Found")
_POLL_S = 0.02
_TORCHRUN = "torch.distributed.run"
_REPLICA_ID = "--fault_tolerance.replica_id"


class Missed(Exception):
    """What a fault was to strike is not there, or what was waited for did not come."""


class Scene:
    """A run: who works for it now, and where its files lie."""

    def __init__(self, launcher: int, folder: Path, num_replicas: int) -> None:
        """`launcher` is the process of `torchtitan-lite launch`, `folder` the run's dump folder."""
        self._launcher = psutil.Process(launcher)
        self.folder = folder
        self.num_replicas = num_replicas

    @property
    def launcher(self) -> psutil.Process:
        return self._launcher

    def lighthouse(self) -> psutil.Process:
        return self._one(lambda words: "torchtitan_lite.lighthouse" in words)

    def messenger(self) -> psutil.Process:
        return self._one(lambda words: "torchtitan_lite.launcher.leave_notices" in words)

    def torchrun(self, replica: int) -> psutil.Process:
        return self._one(lambda words: _TORCHRUN in words and _replica_of(words) == replica)

    def ranks(self, replica: int) -> list[psutil.Process]:
        """The trainers of a replica that are there, in no order."""
        return self._all(
            lambda words: _TORCHRUN not in words and _replica_of(words) == replica,
            self.torchrun(replica),
        )

    def writers(self, replica: int) -> list[psutil.Process]:
        """The writers of checkpoints of a replica."""
        return self._all(is_writer, self.torchrun(replica))

    def snapshots(self, replica: int) -> list[Path]:
        """The files in shared memory that hold a replica's snapshots."""
        with suppress(OSError):
            run_id = replica_run_id((self.folder / "run_id").read_text().strip(), replica)
            user = next(SHARED_MEMORY.glob(f"*/{run_id}"), None)
            if user is not None:
                return list(region_files(user).values())
        return []

    def stored(self) -> list[Path]:
        """The folders of the checkpoints that are stored, the oldest first."""
        root = self.folder / "checkpoint"
        found = [path for path in root.glob("step-*") if parse_step_name(path.name) is not None]
        return sorted(found, key=lambda path: parse_step_name(path.name) or 0)

    def log(self, replica: int, rank: int = 0) -> str:
        """What a rank has printed in the replica's newest attempt."""
        attempts = sorted((self.folder / "launch_logs" / f"replica_{replica:03d}").glob("att*"))
        with suppress(OSError, IndexError):
            return (attempts[-1] / f"rank_{rank}.log").read_text(errors="replace")
        return ""

    def wait_until(self, look: Callable[[], _Found], what: str, timeout_s: float) -> _Found:
        """What `look` returns once that is true. Raises Missed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with suppress(psutil.NoSuchProcess, Missed):
                found = look()
                if found:
                    return found
            if time.monotonic() >= deadline_s:
                raise Missed(f"{what}: not seen in {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _one(self, wanted: Callable[[list[str]], Any]) -> psutil.Process:
        found = self._all(wanted, self._launcher)
        if not found:
            raise Missed("the process is not there")
        return found[0]

    def _all(
        self, wanted: Callable[[list[str]], Any], below: psutil.Process
    ) -> list[psutil.Process]:
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in below.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE and wanted(process.cmdline()):
                        found.append(process)
        return found


def _replica_of(words: list[str]) -> int | None:
    """Of a command line of torchrun or a trainer."""
    if _REPLICA_ID not in words or not {"train.py", "torchtitan_lite"} & set(words):
        return None
    return int(words[words.index(_REPLICA_ID) + 1])
