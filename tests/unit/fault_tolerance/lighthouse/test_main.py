"""The lighthouse as a separate process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.fault_tolerance.lighthouse.clients import connect_clients
from torchtitan_lite.fault_tolerance.lighthouse import client

REPOSITORY = Path(__file__).parents[4]
TOKEN = "a secret of the tests"
_COMMAND = [sys.executable, "-m", "torchtitan_lite.fault_tolerance.lighthouse"]


@contextmanager
def _lighthouse(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process and return it with its address."""
    with subprocess.Popen(
        [*_COMMAND, "--bind", "127.0.0.1:0", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TORCHTITAN_LITE_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            output, _, address = process.stdout.readline().rstrip("\n").rpartition(" ")
            assert output == "listening on"
            yield process, address
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_address_and_exits_on_a_signal(number: signal.Signals) -> None:
    arguments = "--min-replicas=3", "--join-timeout-ms=2000", "--heartbeat-timeout-ms=4000"
    with _lighthouse(*arguments) as (process, address):
        status = client.status(address, TOKEN, 30)
        numbers = "min_replicas", "join_timeout_ms", "heartbeat_timeout_ms"
        assert [status[name] for name in numbers] == [3, 2000, 4000]
        assert client.notify_left(address, "a", TOKEN, 30) == []
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_quorum_ids_are_not_reused_after_a_restart() -> None:
    ids: set[int] = set()
    for _ in range(2):
        with _lighthouse() as (_, address), connect_clients(address, TOKEN) as clients:
            # Each replica that joins causes another quorum.
            for replica_id in map(str, range(8)):
                clients.start_heartbeats(replica_id)
                (quorum,) = clients.request_all(replica_id)
                assert quorum is not None and quorum.quorum_id not in ids
                ids.add(quorum.quorum_id)
                clients.stop_heartbeats(replica_id)
                client.notify_left(address, replica_id, TOKEN, 30)


def _fails(*arguments: str, token: str = TOKEN) -> str:
    done = subprocess.run(
        [*_COMMAND, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "TORCHTITAN_LITE_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_errors_that_users_can_correct_are_one_line() -> None:
    with _lighthouse() as (_, address):
        assert "another process listens there" in _fails("--bind", address)
    assert "min_replicas = 0 is too small" in _fails("--min-replicas", "0")
    assert "has 5 characters of at least 16" in _fails(token="short")


def test_no_torch_is_imported() -> None:
    heavy = {"torch", "torchft", "numpy", "pydantic", "google.protobuf.json_format"}
    code = (
        "import sys\n"
        "from torchtitan_lite.fault_tolerance.lighthouse import __main__, client, server\n"
        f"print(sorted(set({sorted(heavy)}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
