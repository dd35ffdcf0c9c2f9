"""Fakes of the programs that the launcher starts, so that its handling of processes is tested in
seconds.

`python -m ...launcher.fakes launch FOLDER MODE [REPLICAS RANKS MAX_RESTARTS GRACE_S]` launches real
processes that behave according to MODE. Each creates a file FOLDER/pids/KIND-NAME-PID.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_lite.core.errors import MACHINE_FAULT
from torchtitan_lite.core.rank.heartbeat import report_early_stop
from torchtitan_lite.core.rank.processes import WRITER_MODULE
from torchtitan_lite.core.rank.supervised import attach_to_launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import PlainLines
from torchtitan_lite.fault_tolerance.supervision.local_ranks import run_ranks

_SLEEP = "import time; time.sleep(600)"
_WRITER = """
import pathlib, sys, time
durable = pathlib.Path(sys.argv[1])
while not durable.with_name("go").exists():
    time.sleep(0.01)
durable.touch()
"""


def fake(kind: str, *arguments: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.unit.fault_tolerance.supervision.launcher.fakes",
        kind,
        *map(str, arguments),
    ]


def launch(folder: Path, mode: str, replicas: int, ranks: int, restarts: int, grace: float) -> int:
    plan = LaunchPlan(
        num_replicas=replicas,
        ranks=range(1, ranks + 1) if mode.startswith(("slots", "dies")) else [ranks],
        slots_file=folder / "slots" if mode.startswith("slots") else None,
        # Long enough for a busy machine to start the smaller replicas first.
        regrow_after_s=6,
        group_command=lambda number, mesh: fake("parent", folder, mode, mesh.num_ranks, number),
        lighthouse_command=lambda address: fake("lighthouse", folder, address),
        dump_folder=folder,
        log_dir=folder / "logs",
        max_restarts=restarts,
        grace_s=grace,
        notifier_command=lambda address: fake("departure_notifier", folder, address),
    )
    launcher = Launcher(plan, PlainLines())
    status = launcher.run()
    print("\n".join(launcher.failures()), flush=True)
    return status


def lighthouse(folder: Path, address: str) -> int:
    _note(folder, "lighthouse", "0")
    port = int(address.rpartition(":")[2]) or 4321
    print("noise [INFO] [torchft::lighthouse]", end="", file=sys.stderr, flush=True)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    print(" goes on", file=sys.stderr, flush=True)
    time.sleep(600)
    return 0


def departure_notifier(folder: Path, address: str) -> int:
    _note(folder, "departure_notifier", "0")
    for line in sys.stdin:
        with (folder / "left").open("a") as file:
            file.write(f"{address} {line}")
    return 0


def parent(folder: Path, mode: str, ranks: int, replica: int) -> int:
    """The real parent of fake ranks."""
    _note(folder, "parent", str(replica))
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    first = run_ranks(fake("rank", folder, mode, replica), ranks, os.environ, stops)
    return 0 if first is None else max(1, first[1].code)


def rank(folder: Path, mode: str, replica: int) -> int:
    attach_to_launcher()
    number = os.environ["RANK"]
    print(f"rank {number} with {os.environ['TORCHFT_LIGHTHOUSE']}", flush=True)
    leaves: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: leaves.append(True))
    if mode.endswith("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "writer" and number == "0":
        _start_writer_and_stray(folder)
    _note(folder, "rank", f"{replica}.{number}")
    if mode == "wrong":
        print(f"at {time.time()}: training.steps is wrong", file=sys.stderr, flush=True)
        # The other ranks print later, and less clearly.
        time.sleep(0 if number == "0" else 5)
        return 1
    if mode == "short":
        return 0
    metrics = folder / f"replica_{replica:03d}" / "metrics.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    for step in range(1, 6000):
        with metrics.open("a") as file:
            record = {"step": step, "loss": 1 / step, "tokens_per_second": 10, "num_replicas": 1}
            file.write(json.dumps(record) + "\n")
        time.sleep(0.05)
        if leaves:
            (folder / f"saved-{replica}.{number}").touch()
            report_early_stop()
            return 0
        if mode == "dies" and f"{replica}.{number}" == "1.1":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode.isdigit() and replica == 1 and step == 10:
            return int(mode)
        if mode == str(MACHINE_FAULT) and replica == 0 and step == 60:
            return 0
        # Late enough for the launcher to have seen its progress.
        if mode == "breaks" and number == "1" and step == 30:
            raise RuntimeError("the device is gone")
    return 1


def _start_writer_and_stray(folder: Path) -> None:
    """Start a writer, which exits once FOLDER/go exists, and a stray process, which does not."""
    durable = str(folder / "durable")
    commands = {"writer": [_WRITER, durable, "-m", WRITER_MODULE], "stray": [_SLEEP]}
    for kind, command in commands.items():
        child = subprocess.Popen([sys.executable, "-c", *command], start_new_session=True)
        _note(folder, kind, "0", child.pid)


def _note(folder: Path, kind: str, name: str, pid: int | None = None) -> None:
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / f"{kind}-{name}-{pid or os.getpid()}").touch()


def main(kind: str, folder: str, *rest: str) -> int:
    match kind:
        case "launch":
            mode, *numbers = rest
            replicas, ranks, restarts, grace = [
                *map(float, numbers),
                *(2, 2, 3, 20)[len(numbers) :],
            ]
            return launch(Path(folder), mode, int(replicas), int(ranks), int(restarts), grace)
        case "parent":
            return parent(Path(folder), rest[0], int(rest[1]), int(rest[2]))
        case "departure_notifier":
            return departure_notifier(Path(folder), rest[0])
        case "rank":
            return rank(Path(folder), rest[0], int(rest[1]))
    return lighthouse(Path(folder), rest[0])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
