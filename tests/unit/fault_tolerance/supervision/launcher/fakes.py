"""Fakes of the programs that the launcher starts, so that its handling of processes is tested in
seconds.

`python -m ...launcher.fakes launch FOLDER MODE [REPLICAS RANKS MAX_RESTARTS GRACE_S]` launches real
processes that behave according to MODE. Each creates a file FOLDER/pids/KIND-NAME-PID.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan_lite.core.errors import MACHINE_FAULT
from torchtitan_lite.core.rank.processes import WRITER_MODULE
from torchtitan_lite.core.rank.supervised import (
    RANK_CHANNEL,
    attach_to_launcher,
    print_into_rank_log,
)
from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import PlainLines

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
    refusal = "it has no snapshots" if mode == "slots-stubborn" else ""
    plan = LaunchPlan(
        num_replicas=replicas,
        ranks=range(1, ranks + 1) if mode.startswith(("slots", "dies")) else [ranks],
        slots_file=folder / "slots" if mode.startswith("slots") else None,
        # Long enough for a busy machine to start the smaller replicas first.
        regrow_after_s=6,
        process_command=lambda replica: fake("rank", folder, mode, replica),
        resize_refusal=refusal,
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


def rank(folder: Path, mode: str, replica: int) -> int:
    """A process that trains whenever its member orders it to, see `agent.worker`."""
    attach_to_launcher()
    channel = AgentChannel(socket.socket(fileno=int(os.environ.pop(RANK_CHANNEL))))
    if mode == "unstartable":
        print("No module named 'a'", file=sys.stderr, flush=True)
        return 1
    channel.send(standby=True)
    while not channel.has_ended:
        for order in channel.receive(wait=True):
            if "exit" in order:
                return int(order["exit"])
            if "start" in order:
                if order["has_listener"]:
                    os.close(channel.take_descriptor())
                os.environ.update(order["start"])
                print_into_rank_log()
                channel.send(**_train(channel, folder, mode, replica))
    return 1


def _train(channel: AgentChannel, folder: Path, mode: str, replica: int) -> dict[str, Any]:
    """Train, and return the outcome."""
    number = os.environ["RANK"]
    rank = f"{replica}.{number}"
    print(f"rank {number} with {os.environ['TORCHFT_LIGHTHOUSE']}", flush=True)
    stops: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
    if mode.endswith("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "writer" and number == "0":
        _start_writer_and_stray(folder)
    _note(folder, "rank", rank)
    if mode == "wrong":
        print("training.steps is wrong", file=sys.stderr, flush=True)
        return _ended(2, "training.steps is wrong", stopped=False)
    if mode == "failing" and number == "0":
        print(f"ValueError: at {time.time()}", file=sys.stderr, flush=True)
        channel.send(failed=f"ValueError: at {time.time()}", may_pass=False, ends=False)
        return {"standby": True}
    if mode == "short":
        return _ended(0, "", stopped=False)
    metrics = folder / f"replica_{replica:03d}" / "metrics.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    for step in range(1, 6000):
        with metrics.open("a") as file:
            record = {"step": step, "loss": 1 / step, "tokens_per_second": 10, "num_replicas": 1}
            file.write(json.dumps(record) + "\n")
        if step == 1:
            channel.send(progress=True)
        time.sleep(0.05)
        orders = channel.receive(wait=False)
        if any("abort" in order or "exit" in order for order in orders):
            return {"standby": True}
        if any("leave" in order for order in orders):
            (folder / f"left-{rank}").touch()
            return {"standby": True}
        if stops:
            (folder / f"saved-{rank}").touch()
            return _ended(0, "", stopped=True)
        if mode == "dies" and rank == "1.1":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode.isdigit() and replica == 1 and step == 10:
            return _ended(int(mode), "", stopped=False)
        if mode == str(MACHINE_FAULT) and replica == 0 and step == 60:
            return _ended(0, "", stopped=False)
        # Late enough for the launcher to have seen its progress.
        if mode == "breaks" and number == "1" and step == 30:
            error = "RuntimeError: the device is gone"
            print(error, file=sys.stderr, flush=True)
            channel.send(failed=error, may_pass=False, ends=False)
            return {"standby": True}
    return _ended(1, "", stopped=False)


def _ended(status: int, reason: str, *, stopped: bool) -> dict[str, Any]:
    return {"ended": status, "reason": reason, "stopped": stopped, "may_restart": False}


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
        case "departure_notifier":
            return departure_notifier(Path(folder), rest[0])
        case "rank":
            return rank(Path(folder), rest[0], int(rest[1]))
    return lighthouse(Path(folder), rest[0])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
