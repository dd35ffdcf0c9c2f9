"""Monitor that detects a hung replica, has a subprocess examine its ranks, and reports why the
replica must be ended.

`python -m torchtitan_lite.fault_tolerance.supervision.failures.hang_diagnosis FOLDER` is that
subprocess: the launcher must not block. It reads the ranks from standard input and writes
FOLDER/hang.txt, whose first line is the reason. Then follow, per rank: its phase, the collectives
in which it waits, the stacks of its threads, and their state in the kernel. Each source has a time
limit of a few seconds and may fail: a stopped process does not answer, and one inside a driver
cannot be inspected.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.core.phases import Phase
from torchtitan_lite.core.rank.heartbeat import Heartbeat
from torchtitan_lite.core.rank.processes import kill_process_group, parent_of, signal_process, spawn
from torchtitan_lite.core.rank.supervised import FLIGHT_SIGNAL, STACKS_SIGNAL, rank_log
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    FlightRecord,
    flight_record_file,
    read_flight_record,
)
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import (
    STOPPED,
    RankStatus,
    StallDetector,
    describe,
    hang_cause,
    hang_reason,
    rank_named_in,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

REPORT = "hang.txt"
TIMEOUT_S = 15.0
"""Time limit of the diagnosis; after it the launcher proceeds without a report."""
_ANSWER_S = 1.5
_STACKS_S = 6.0
_MOST_THREADS = 64


class MonitoredRanks(Protocol):
    """The processes of one generation of a replica."""

    folder: Path
    """Where their logs are."""
    environment: Mapping[str, str]

    @property
    def pid(self) -> int:
        """The process that starts the ranks."""
        ...

    def rank_statuses(self) -> list[RankStatus]:
        """Return what is known of each rank."""
        ...


class HangMonitor:
    """Hang detection for one generation of a replica."""

    def __init__(self, group: MonitoredRanks) -> None:
        self._group = group
        self._stalls = StallDetector()
        self._diagnosis: subprocess.Popen[bytes] | None = None
        self._last_heartbeats: list[Heartbeat | None] = []
        """Heartbeats of the late ranks when the diagnosis started."""
        self._late: set[int] = set()
        self._deadline_s, self._asked_ns = 0.0, 0

    @property
    def pid(self) -> int | None:
        """Process id of the running diagnosis; None if none runs."""
        return None if self._diagnosis is None else self._diagnosis.pid

    def poll(self, now_s: float) -> Failure | None:
        """Check the ranks. Return the reason if the generation must be ended."""
        if self._diagnosis is not None:
            if self._diagnosis.poll() is None and now_s < self._deadline_s:
                return None
            self.close()
            return self._conclude(now_s)
        ranks = self._group.rank_statuses()
        self._late = self._stalls.update(ranks, now_s)
        if self._late:
            self._last_heartbeats = self._late_heartbeats()
            self._deadline_s, self._asked_ns = now_s + TIMEOUT_S, time.time_ns()
            try:
                self._start_diagnosis(diagnosis_request(ranks, self._late, self._group.pid))
            except OSError:
                # Neither a full disk nor a failed fork may prevent the replica from being ended, or
                # end the others.
                return self._conclude(now_s)
        return None

    def close(self) -> None:
        """Kill a diagnosis that is no longer needed."""
        if self._diagnosis is not None:
            kill_process_group(self._diagnosis.pid)
            self._diagnosis.wait()
            self._diagnosis = None

    def _conclude(self, now_s: float) -> Failure | None:
        if self._late_heartbeats() != self._last_heartbeats:
            # The ranks have made progress: they were slow, not hung.
            return None
        folder, ranks = self._group.folder, self._group.rank_statuses()
        reason = reported_reason(folder) or hang_reason(ranks, self._late, {}, now_s)
        records = newer_flight_records(folder, [rank.number for rank in ranks], self._asked_ns)
        # An empty signature: the hang does not show that the next generation would fail too.
        cause = hang_cause(ranks, self._late, records)
        return Failure(
            reason, "", folder / REPORT, rank_named_in(reason), cause=cause, is_hang=True
        )

    def _late_heartbeats(self) -> list[Heartbeat | None]:
        return [
            rank_status.heartbeat
            for rank_status in self._group.rank_statuses()
            if rank_status.number in self._late
        ]

    def _start_diagnosis(self, payload: bytes) -> None:
        command = [
            sys.executable,
            "-m",
            "torchtitan_lite.fault_tolerance.supervision.failures.hang_diagnosis",
        ]
        folder: Path = self._group.folder
        (folder / REPORT).unlink(missing_ok=True)
        # A file rather than a pipe, which would block without a reader.
        with tempfile.TemporaryFile() as source, (folder / "diagnosis.log").open("ab") as log:
            source.write(payload)
            source.seek(0)
            self._diagnosis = spawn(
                [*command, str(folder)],
                _without_secrets(self._group.environment),
                stdout=log.fileno(),
                stdin=source.fileno(),
            )


def diagnosis_request(ranks: Sequence[RankStatus], late: Set[int], parent: int) -> bytes:
    """Return the input of the diagnosis, as JSON."""
    payload = {"ranks": [asdict(rank) for rank in ranks], "late": sorted(late), "parent": parent}
    return json.dumps(payload, default=lambda phase: phase.value).encode()


def reported_reason(folder: Path) -> str | None:
    """Return the reason from a report; None if there is no report."""
    try:
        with (folder / REPORT).open(errors="replace") as file:
            return file.readline(1000).strip() or None
    except OSError:
        return None


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without tokens, which the diagnosis does not need."""
    return {name: value for name, value in environment.items() if not name.endswith("_TOKEN")}


def main(folder: Path, payload: Mapping[str, Any]) -> int:
    """Examine the ranks and write the report."""
    ranks = [_rank_status(entry) for entry in payload["ranks"]]
    # The process id of an exited rank may belong to another process by now.
    ranks = [rank for rank in ranks if parent_of(rank.pid) == payload["parent"]]
    late = set(payload["late"])
    asked_ns = time.time_ns()
    for rank in ranks:
        request_flight_record(rank.pid)
    # In this order: faulthandler walks the frames of all threads without the GIL, and crashes the
    # rank if one of them runs Python meanwhile, as the thread that writes the flight record does.
    _wait_for_flight_records(ranks, folder, asked_ns)
    stacks = _collect_stacks(ranks, folder)
    flight_records = newer_flight_records(folder, [rank.number for rank in ranks], asked_ns)
    now_s = time.monotonic()
    sections = [hang_reason(ranks, late, flight_records, now_s)]
    for rank in ranks:
        flight = flight_records.get(rank.number)
        sections.append(
            f"rank {rank.number}, process {rank.pid}: {describe(rank, now_s)}\n"
            f"{_describe_collectives(flight, flight_record_file(folder, rank.number))}\n"
            f"{stacks[rank.number].rstrip()}\n{_kernel_state(rank.pid)}"
        )
    part = folder / (REPORT + ".part")
    part.write_text("\n\n".join(sections) + "\n")
    part.rename(folder / REPORT)
    return 0


def request_flight_record(pid: int) -> bool:
    """Make a rank write its flight record; return whether it can."""
    return _signal_if_expected(pid, FLIGHT_SIGNAL, "SigBlk")


def newer_flight_records(
    folder: Path, ranks: Iterable[int], than_ns: int
) -> dict[int, FlightRecord]:
    """Return the flight records of `ranks` that were written after a time (Unix time, in
    nanoseconds), by rank."""
    return {
        rank: record
        for rank in ranks
        if has_newer_flight_record(folder, rank, than_ns)
        and (record := read_flight_record(flight_record_file(folder, rank))) is not None
    }


def _rank_status(payload: Mapping[str, Any]) -> RankStatus:
    heartbeat = payload["heartbeat"]
    if heartbeat is not None:
        heartbeat = Heartbeat(**{**heartbeat, "phase": Phase(heartbeat["phase"])})
    return RankStatus(payload["number"], payload["pid"], heartbeat, payload["state"])


def _signal_if_expected(pid: int, number: signal.Signals, mask: str) -> bool:
    """Send a signal to a process that handles or blocks it, and return whether it was sent: any
    other process would be killed by it. `mask` names the line of /proc/PID/status to check."""
    match = re.search(rf"^{mask}:\s*([0-9a-f]+)$", _read_proc(pid, "status"), re.MULTILINE)
    expects = match is not None and int(match[1], 16) >> (number - 1) & 1
    if expects:
        signal_process(pid, number)
    return bool(expects)


def _collect_stacks(ranks: Sequence[RankStatus], folder: Path) -> dict[int, str]:
    """Return the stacks of the threads of each rank, by its number: Python and native ones from
    py-spy if it is installed, else the Python stacks written by the rank itself."""
    beside = str(Path(sys.executable).parent)
    spy = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if spy is None:
        return _faulthandler_stacks(ranks, folder)
    started = {}
    for rank in ranks:
        # To unwind native stacks, py-spy waits for a stop of its own making, which a stopped
        # process never reaches.
        way = "--nonblocking" if rank.state == STOPPED else "--native"
        started[rank.number] = subprocess.Popen(
            [spy, "dump", way, "--pid", str(rank.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    deadline_s = time.monotonic() + _STACKS_S
    stacks = {}
    for number, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = b"py-spy timed out."
        stacks[number] = output.decode(errors="replace")
    return stacks


def _faulthandler_stacks(ranks: Sequence[RankStatus], folder: Path) -> dict[int, str]:
    logs = {rank.number: rank_log(folder, rank.number) for rank in ranks}
    before = {number: _size(path) for number, path in logs.items()}
    asked = {
        rank.number for rank in ranks if _signal_if_expected(rank.pid, STACKS_SIGNAL, "SigCgt")
    }
    deadline_s = time.monotonic() + _ANSWER_S
    # faulthandler writes the stacks in many small writes: wait until the size is stable.
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        now = {number: _size(logs[number]) for number in asked}
        if now == sizes and all(now[number] > before[number] for number in asked):
            break
        sizes = now
    stacks = {}
    for number, path in logs.items():
        with path.open("rb") as file:
            file.seek(before[number])
            answer = file.read().decode(errors="replace") if number in asked else ""
        stacks[number] = answer or "No stacks: no answer, and py-spy is not installed."
    return stacks


def _wait_for_flight_records(ranks: Sequence[RankStatus], folder: Path, asked_ns: int) -> None:
    deadline_s = time.monotonic() + _ANSWER_S
    answering = [rank for rank in ranks if rank.state != STOPPED]
    while time.monotonic() < deadline_s and not all(
        has_newer_flight_record(folder, rank.number, asked_ns) for rank in answering
    ):
        time.sleep(0.02)


def has_newer_flight_record(folder: Path, rank: int, than_ns: int) -> bool:
    """Return whether a rank has written its flight record after a time (Unix time, in
    nanoseconds)."""
    try:
        return flight_record_file(folder, rank).stat().st_mtime_ns >= than_ns - 10**7
    except OSError:
        return False


def _describe_collectives(flight: FlightRecord | None, path: Path) -> str:
    if flight is None:
        return "Unknown collectives: the rank did not write its flight record."
    lines = [f"waits in {call.description}" for call in flight.pending]
    return "\n".join([*(lines or ["waits in no collective"]), f"flight recorder: {path}"])


def _kernel_state(pid: int) -> str:
    """Describe the threads of a process as the kernel reports them."""
    lines = []
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return "The process has exited."
    for thread in threads[:_MOST_THREADS]:
        about = f"task/{thread}"
        name = _read_proc(pid, f"{about}/comm").strip()
        state = re.search(r"^State:\s*(.+)$", _read_proc(pid, f"{about}/status"), re.MULTILINE)
        channel, call = (
            _read_proc(pid, f"{about}/wchan").strip(),
            _read_proc(pid, f"{about}/syscall").split(),
        )
        line = f"  thread {thread} {name!r}: {state[1] if state else 'gone'}"
        if channel not in ("", "0"):
            line += f", in {channel}"
        if call and call[0].isdigit():
            line += f", system call {call[0]}"
        lines.append(line)
        if thread == pid or (state and state[1].startswith("D")):
            stack = _read_proc(pid, f"{about}/stack").split("\n")
            lines += [f"    {frame.strip()}" for frame in stack[:12] if frame.strip()]
    if len(threads) > _MOST_THREADS:
        lines.append(f"  and {len(threads) - _MOST_THREADS} more threads")
    return "\n".join(["In the kernel:", *lines])


def _read_proc(pid: int, name: str) -> str:
    """Read a file of /proc/PID; empty if it is not readable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.load(sys.stdin)))
