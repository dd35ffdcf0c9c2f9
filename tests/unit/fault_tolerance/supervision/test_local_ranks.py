"""Ranks of one machine: the first failure ends all, signals are forwarded, rank 0 is the store."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision import local_ranks
from torchtitan_lite.fault_tolerance.supervision.local_ranks import run_ranks

_STORE = """
import os, socket
from torchtitan_lite.core.rank.supervised import STORE_LISTENER
assert (STORE_LISTENER in os.environ) == (os.environ["RANK"] == "0")
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if STORE_LISTENER in os.environ:
    listener = socket.socket(fileno=int(os.environ[STORE_LISTENER]))
    listener.settimeout(60)
    assert listener.getsockname()[1] == address[1]
    listener.accept()[0].sendall(b"a value")
else:
    assert socket.create_connection(address, 60).recv(7) == b"a value"
"""
_LEAVES = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def leave(number, frame):
    (Path(sys.argv[1]) / f"{rank}-{number}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(Path(sys.argv[1]) / f"{rank}-started").touch()
"""


def run(source: str, folder: Path, requests: list[int], num_ranks: int = 2) -> object:
    command = [sys.executable, "-c", source, str(folder)]
    return run_ranks(command, num_ranks, os.environ, requests)


def test_rank_0_hosts_the_store(tmp_path: Path) -> None:
    assert run(_STORE, tmp_path, []) is None


def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    wait = "\nwhile not (Path(sys.argv[1]) / '0-started').exists(): time.sleep(0.01)"
    source = _LEAVES + wait + "\nif rank == '1': sys.exit(3)\ntime.sleep(60)"
    began_s = time.monotonic()
    assert run(source, tmp_path, []) == (1, ExitStatus(3))
    assert time.monotonic() - began_s < 30
    assert (tmp_path / f"0-{int(signal.SIGTERM)}").exists()


def test_a_rank_that_does_not_leave_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ranks, "_LEAVE_S", 0.3)
    source = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getpid(), 9) if os.environ['RANK'] == '0' else time.sleep(60)"
    )
    assert run(source, tmp_path, []) == (0, ExitStatus(-signal.SIGKILL))


def test_signals_are_forwarded(tmp_path: Path) -> None:
    requests: list[int] = []

    def ask() -> None:
        while len(list(tmp_path.glob("*-started"))) < 2:
            time.sleep(0.01)
        # A closed terminal is a request to save and exit.
        requests.append(signal.SIGHUP)

    thread = threading.Timer(0.5, ask)
    thread.start()
    assert run(_LEAVES + "\ntime.sleep(60)", tmp_path, requests) is None
    thread.join()
    assert {path.name for path in tmp_path.glob("*-15")} == {"0-15", "1-15"}


def test_each_request_is_forwarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    closed: list[int] = []
    process: Any = SimpleNamespace(pid=7, wait=lambda: 0)
    polls = [set[int](), {5}]
    monkeypatch.setattr(local_ranks, "_start", lambda *_: [local_ranks._Rank(0, process, 5)])
    monkeypatch.setattr(local_ranks, "signal_process", lambda *one: sent.append(one))
    monkeypatch.setattr(local_ranks, "wait_readable", lambda *_: polls.pop(0))
    monkeypatch.setattr(local_ranks.os, "close", closed.append)
    assert run_ranks([], 1, {}, [signal.SIGTERM]) is None
    assert sent == [(7, signal.SIGTERM)] and closed == [5]
