"""The lighthouse as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.lighthouse.crew import crew_of
from torchtitan_lite.lighthouse import client

REPOSITORY = Path(__file__).parents[3]
TOKEN = "a secret of the tests"
_COMMAND = [sys.executable, "-m", "torchtitan_lite.lighthouse"]


@contextmanager
def _lighthouse(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the address that it tells."""
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
            said, _, address = process.stdout.readline().rstrip("\n").rpartition(" ")
            assert said == "listening on"
            yield process, address
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_on_a_signal(number: signal.Signals) -> None:
    arguments = "--min-replicas=3", "--join-timeout-ms=2000", "--heartbeat-timeout-ms=4000"
    with _lighthouse(*arguments) as (process, address):
        told = client.status(address, TOKEN, 30)
        numbers = "min_replicas", "join_timeout_ms", "heartbeat_timeout_ms"
        assert [told[name] for name in numbers] == [3, 2000, 4000]
        assert client.notify_left(address, "a", TOKEN, 30) == []
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_no_id_comes_again_when_it_is_started_again() -> None:
    told: set[int] = set()
    for _ in range(2):
        with _lighthouse() as (_, address), crew_of(address) as crew:
            # Each that comes makes another quorum.
            for replica_id in map(str, range(8)):
                crew.live(replica_id)
                (quorum,) = crew.ask_all(replica_id)
                assert quorum is not None and quorum.quorum_id not in told
                told.add(quorum.quorum_id)
                crew.die(replica_id)
                client.notify_left(address, replica_id, TOKEN, 30)


def _fails(*arguments: str) -> str:
    done = subprocess.run(
        [*_COMMAND, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_what_a_user_can_mend_is_one_line() -> None:
    with _lighthouse() as (_, address):
        assert "another process listens there" in _fails("--bind", address)
    assert "min_replicas = 0 is too small" in _fails("--min-replicas", "0")


def test_no_torch_is_imported() -> None:
    heavy = {"torch", "torchft", "numpy", "pydantic", "google.protobuf.json_format"}
    code = (
        "import sys, torchtitan_lite.lighthouse.__main__, torchtitan_lite.lighthouse.server, "
        f"torchtitan_lite.lighthouse.client; print(sorted(set({sorted(heavy)}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
