"""`python -m torchtitan_lite.launcher.diagnosis FOLDER`: writes what can be learnt of a replica
that hangs, whose ranks are told on standard input, into FOLDER/hang.txt. Layer: above hang and
processes.

The first line is the reason for which the replica is to be ended. Then, for each rank: what it
does, the collectives in which it waits, the stacks of its threads, and what the kernel knows of
these. A process of its own does this, since the launcher must not wait; each source is given a few
seconds and may fail: a process that is stopped cannot answer, one in a driver not be looked into.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.flight import Flight, flight_file, read_flight
from torchtitan_lite.launcher.hang import STOPPED, Seen, in_words, reason
from torchtitan_lite.launcher.parent_death import parent_of
from torchtitan_lite.launcher.processes import signal_process
from torchtitan_lite.launcher.pulse import Pulse
from torchtitan_lite.launcher.supervised import FLIGHT_SIGNAL, STACKS_SIGNAL, rank_log
from torchtitan_lite.phases import Phase

REPORT = "hang.txt"
TIMEOUT_S = 15.0
"""Of the whole; the launcher goes on without it then."""
_ANSWER_S = 1.5
_STACKS_S = 6.0
_MOST_THREADS = 64


def request(ranks: Sequence[Seen], late: Set[int], torchrun: int) -> bytes:
    """What the process is told."""
    told = {"ranks": [asdict(one) for one in ranks], "late": sorted(late), "torchrun": torchrun}
    return json.dumps(told, default=lambda phase: phase.value).encode()


def first_line(folder: Path) -> str | None:
    """The reason in a report; None where there is none."""
    try:
        with (folder / REPORT).open(errors="replace") as file:
            return file.readline(1000).strip() or None
    except OSError:
        return None


def main(folder: Path, told: Mapping[str, Any]) -> int:
    """Look, and write the report."""
    ranks = [_seen(one) for one in told["ranks"]]
    # The number of a process that has ended may be another's by now.
    ranks = [one for one in ranks if parent_of(one.pid) == told["torchrun"]]
    late = set(told["late"])
    asked_ns = time.time_ns()
    for one in ranks:
        _ask(one.pid, FLIGHT_SIGNAL, "SigBlk")
    stacks = _stacks(ranks, folder)
    _wait_for_flights(ranks, folder, asked_ns)
    flights = {
        one.number: found
        for one in ranks
        if _is_newer(flight_file(folder, one.number), asked_ns)
        and (found := read_flight(flight_file(folder, one.number))) is not None
    }
    now_s = time.monotonic()
    sections = [reason(ranks, late, flights, now_s)]
    for one in ranks:
        flight = flights.get(one.number)
        sections.append(
            f"rank {one.number}, process {one.pid}: {in_words(one, now_s)}\n"
            f"{_calls(flight, flight_file(folder, one.number))}\n"
            f"{stacks[one.number].rstrip()}\n{_kernel(one.pid)}"
        )
    part = folder / (REPORT + ".part")
    part.write_text("\n\n".join(sections) + "\n")
    part.rename(folder / REPORT)
    return 0


def _seen(told: Mapping[str, Any]) -> Seen:
    pulse = told["pulse"]
    if pulse is not None:
        pulse = Pulse(**{**pulse, "phase": Phase(pulse["phase"])})
    return Seen(told["number"], told["pid"], pulse, told["state"])


def _ask(pid: int, number: signal.Signals, mask: str) -> bool:
    """Send a signal to a process that expects it; to another it would be the end. `mask` is the
    line of /proc/PID/status that tells. Whether it was sent."""
    found = re.search(rf"^{mask}:\s*([0-9a-f]+)$", _text(pid, "status"), re.MULTILINE)
    expects = found is not None and int(found[1], 16) >> (number - 1) & 1
    if expects:
        signal_process(pid, number)
    return bool(expects)


def _stacks(ranks: Sequence[Seen], folder: Path) -> dict[int, str]:
    """The stacks of the threads of each rank, by its number: Python's and the native ones by
    py-spy, where that is installed; else Python's, as the rank itself writes them."""
    beside = str(Path(sys.executable).parent)
    spy = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if spy is None:
        return _own_stacks(ranks, folder)
    started = {}
    for one in ranks:
        # py-spy waits for a stop of its own to unwind native stacks, which this would never make.
        way = "--nonblocking" if one.state == STOPPED else "--native"
        started[one.number] = subprocess.Popen(
            [spy, "dump", way, "--pid", str(one.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    deadline_s = time.monotonic() + _STACKS_S
    found = {}
    for number, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = b"py-spy did not come back."
        found[number] = output.decode(errors="replace")
    return found


def _own_stacks(ranks: Sequence[Seen], folder: Path) -> dict[int, str]:
    logs = {one.number: rank_log(folder, one.number) for one in ranks}
    before = {number: _size(path) for number, path in logs.items()}
    asked = {one.number for one in ranks if _ask(one.pid, STACKS_SIGNAL, "SigCgt")}
    deadline_s = time.monotonic() + _ANSWER_S
    # The stacks come in many small writes: wait until no more come.
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        now = {number: _size(logs[number]) for number in asked}
        if now == sizes and all(now[number] > before[number] for number in asked):
            break
        sizes = now
    found = {}
    for number, path in logs.items():
        with path.open("rb") as file:
            file.seek(before[number])
            answer = file.read().decode(errors="replace") if number in asked else ""
        found[number] = answer or "No stacks: it does not answer, and py-spy is not installed."
    return found


def _wait_for_flights(ranks: Sequence[Seen], folder: Path, asked_ns: int) -> None:
    deadline_s = time.monotonic() + _ANSWER_S
    answering = [one for one in ranks if one.state != STOPPED]
    while time.monotonic() < deadline_s and not all(
        _is_newer(flight_file(folder, one.number), asked_ns) for one in answering
    ):
        time.sleep(0.02)


def _is_newer(path: Path, than_ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= than_ns - 10**7
    except OSError:
        return False


def _calls(flight: Flight | None, path: Path) -> str:
    if flight is None:
        return "Its collectives are not known: it did not write its flight recorder."
    lines = [f"waits in {call.in_words}" for call in flight.pending]
    return "\n".join([*(lines or ["waits in no collective"]), f"flight recorder: {path}"])


def _kernel(pid: int) -> str:
    """What the kernel knows of the threads."""
    lines = []
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return "It is gone."
    for thread in threads[:_MOST_THREADS]:
        about = f"task/{thread}"
        name = _text(pid, f"{about}/comm").strip()
        state = re.search(r"^State:\s*(.+)$", _text(pid, f"{about}/status"), re.MULTILINE)
        channel, call = _text(pid, f"{about}/wchan").strip(), _text(pid, f"{about}/syscall").split()
        told = f"  thread {thread} {name!r}: {state[1] if state else 'gone'}"
        if channel not in ("", "0"):
            told += f", in {channel}"
        if call and call[0].isdigit():
            told += f", system call {call[0]}"
        lines.append(told)
        if thread == pid or (state and state[1].startswith("D")):
            stack = _text(pid, f"{about}/stack").split("\n")
            lines += [f"    {line.strip()}" for line in stack[:12] if line.strip()]
    if len(threads) > _MOST_THREADS:
        lines.append(f"  and {len(threads) - _MOST_THREADS} more threads")
    return "\n".join(["In the kernel:", *lines])


def _text(pid: int, name: str) -> str:
    """A file of /proc/PID; empty where it may not be read."""
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
