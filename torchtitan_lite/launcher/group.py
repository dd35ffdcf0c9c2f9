"""One attempt of a replica: a torchrun and its ranks. Layer: above processes and supervised.

torchrun looks for ranks that died only now and then, and lets their neighbours take their time. So
the ranks are watched here, through descriptors of processes that tell of an end at once.
"""

import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.launcher.failure import Failure, failure_of
from torchtitan_lite.launcher.hang import Seen
from torchtitan_lite.launcher.log_lines import last_lines
from torchtitan_lite.launcher.processes import (
    ExitStatus,
    children_of,
    ended_with,
    environment_of,
    kill_session,
    signal_process,
    spawn,
    state_of,
)
from torchtitan_lite.launcher.pulse import PULSES, PulseBoard
from torchtitan_lite.launcher.supervised import LAUNCHER_PID, RANK_LOGS, rank_log


@dataclass
class _Rank:
    """A rank's process, which torchrun has started."""

    number: int
    pid: int
    descriptor: int
    """A pidfd, readable once the process has ended; -1 once that was seen."""


class Group:
    """A torchrun that was started, and its ranks as they come up."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        num_ranks: int,
        folder: Path,
    ) -> None:
        """Start `command`; logs go to `folder`, which is made. Raises OSError."""
        self._num_ranks, self.folder, self.environment = num_ranks, folder, environment
        folder.mkdir(parents=True)
        self._pulses = PulseBoard(num_ranks)
        with self._own_log.open("wb") as log:
            self._torchrun = spawn(
                command,
                {
                    **environment,
                    LAUNCHER_PID: str(os.getpid()),
                    RANK_LOGS: str(folder),
                    PULSES: self._pulses.path,
                },
                output=log.fileno(),
            )
        self._descriptor = os.pidfd_open(self._torchrun.pid)
        self._ranks: dict[int, _Rank] = {}
        self._first_bad: tuple[int | None, ExitStatus, Path] | None = None
        """The rank, None for torchrun."""
        self._hang: Failure | None = None
        self._num_clean = 0

    @property
    def descriptors(self) -> list[int]:
        """Readable once a process has ended that is not known to have ended."""
        ranks = (rank.descriptor for rank in self._ranks.values())
        return [one for one in (self._descriptor, *ranks) if one >= 0]

    @property
    def pid(self) -> int:
        """Of torchrun."""
        return self._torchrun.pid

    @property
    def has_ended(self) -> bool:
        """Whether torchrun and all ranks that were seen are gone."""
        return not self.descriptors

    @property
    def has_finished(self) -> bool:
        """Whether all ranks have ended well."""
        return self._num_clean == self._num_ranks or self._torchrun.returncode == 0

    @property
    def has_failed(self) -> bool:
        """Whether a rank has, or torchrun."""
        return self._first_bad is not None or self._hang is not None

    @property
    def leader_log(self) -> Path:
        """What rank 0 prints."""
        return rank_log(self.folder, 0)

    def look(self) -> None:
        """Take note of ranks that came up, and of processes that have ended."""
        if len(self._ranks) < self._num_ranks and self._torchrun.returncode is None:
            self._find_ranks()
        self._look_at_torchrun()
        ended = [rank for rank in self._ranks.values() if _is_over(rank.descriptor)]
        seen = [(rank, ended_with(rank.pid)) for rank in ended]
        for rank in ended:
            os.close(rank.descriptor)
            rank.descriptor = -1
        # One that torchrun was faster to wait for is torchrun's to act on.
        statuses = [(rank.number, status) for rank, status in seen if status is not None]
        self._num_clean += sum(status.is_clean for _, status in statuses)
        bad = [(number, status) for number, status in statuses if not status.is_clean]
        if bad and self._first_bad is None:
            # One that says why comes before one that was cut off.
            number, status = min(bad, key=lambda one: (one[1].is_signal, one[0]))
            self._first_bad = (number, status, rank_log(self.folder, number))
        if self._descriptor < 0 and not self.has_finished and self._first_bad is None:
            status = ExitStatus(self._torchrun.returncode or 0)
            self._first_bad = (None, status, self._own_log)
        if self._num_clean == self._num_ranks and self._torchrun.returncode is None:
            # It would find out by itself, later.
            kill_session(self._torchrun.pid)

    def seen(self) -> list[Seen]:
        """What the ranks do at this moment, those that have ended aside."""
        living = sorted(self._ranks.values(), key=lambda rank: rank.number)
        return [
            Seen(rank.number, rank.pid, self._pulses.read(rank.number), state_of(rank.pid))
            for rank in living
            if rank.descriptor >= 0
        ]

    def hangs(self, failure: Failure) -> None:
        """Count it as failed, though its processes are there."""
        self._hang = failure

    def failure(self) -> Failure:
        """What became of a group that has failed. All is told once its processes are gone."""
        if self._hang is not None:
            return self._hang
        assert self._first_bad is not None
        rank, status, log = self._first_bad
        who = "torchrun" if rank is None else f"rank {rank}"
        # A rank that could not even begin has told torchrun's output of it.
        return failure_of(who, status, log if last_lines(log, 1) else self._own_log, rank)

    def terminate(self) -> None:
        """Ask all ranks to save and leave. torchrun passes it on."""
        if self._torchrun.returncode is None:
            signal_process(self._torchrun.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End all at once."""
        if self._torchrun.returncode is None:
            # It must not start ranks that nobody has seen.
            signal_process(self._torchrun.pid, signal.SIGSTOP)
            self._find_ranks()
        for rank in self._ranks.values():
            kill_session(rank.pid)
        if self._torchrun.returncode is None:
            kill_session(self._torchrun.pid)

    def close(self) -> None:
        """Let go of what it took, once it has ended."""
        self._pulses.close()

    @property
    def _own_log(self) -> Path:
        return self.folder / "torchrun.log"

    def _look_at_torchrun(self) -> None:
        if not _is_over(self._descriptor):
            return
        code = self._torchrun.wait()
        os.close(self._descriptor)
        self._descriptor = -1
        if code < 0 and not self.has_finished and self._first_bad is None:
            # Its ranks die with it.
            self._first_bad = (None, ExitStatus(code), self._own_log)

    def _find_ranks(self) -> None:
        for pid in children_of(self._torchrun.pid):
            if pid in self._ranks:
                continue
            number = environment_of(pid).get("RANK", "")
            # Between fork and exec it is still a copy of torchrun.
            if number.isdigit():
                self._watch(pid, int(number))

    def _watch(self, pid: int, number: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._ranks[pid] = _Rank(number, pid, descriptor)


def _is_over(descriptor: int) -> bool:
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def torchrun_command(python: str, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """torchrun for one replica on this machine; `arguments` begin with the program."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        "--max-restarts=0",
        # Nobody can ask how a rank has ended that torchrun has waited for: it looks seldom.
        "--monitor-interval=5",
        *arguments,
    ]
