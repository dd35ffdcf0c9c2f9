"""`torchtitan-lite coordinator` as a separate process, and the status of one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.fault_tolerance.lighthouse.clients import connect_clients
from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.fault_tolerance.lighthouse.client import notify_left
from torchtitan_lite.fault_tolerance.supervision.coordinator.client import coordinator_status

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a secret of the tests"
_COMMAND = [sys.executable, "-m", "torchtitan_lite", "coordinator"]


@contextmanager
def _coordinator(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
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
    with _coordinator(*arguments) as (process, address):
        quorum = coordinator_status(address, TOKEN, 30)["quorum"]
        numbers = "min_replicas", "join_timeout_ms", "heartbeat_timeout_ms"
        assert [quorum[name] for name in numbers] == [3, 2000, 4000]
        assert notify_left(address, "a", TOKEN, 30) == []
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_quorum_ids_are_not_reused_after_a_restart() -> None:
    ids: set[int] = set()
    for _ in range(2):
        with _coordinator() as (_, address), connect_clients(address, TOKEN) as clients:
            # Each replica that joins causes another quorum.
            for replica_id in map(str, range(8)):
                clients.start_heartbeats(replica_id)
                (quorum,) = clients.request_all(replica_id)
                assert quorum is not None and quorum.quorum_id not in ids
                ids.add(quorum.quorum_id)
                clients.stop_heartbeats(replica_id)
                notify_left(address, replica_id, TOKEN, 30)


def test_the_status_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", TOKEN)
    with _coordinator() as (_, address), connect_clients(address, TOKEN) as clients:
        clients.start_heartbeats("replica_00000:f:u")
        assert clients.request_all("replica_00000:f:u", step=32)
        assert main(["coordinator", "--status", address]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"Coordinator {address} (term ")
        assert "does not lead: no machine has reported." in text
        assert text.splitlines()[-1].split()[:4] == ["replica_00000", "member", "32", "1"]
        assert main(["coordinator", "--json", "--status", f"http://{address}"]) == 0
        assert json.loads(capsys.readouterr().out)["quorum"]["members"][0]["step"] == 32
        monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "another secret of the tests")
        assert main(["coordinator", "--status", address]) == 1
        assert "TORCHTITAN_LITE_TOKEN must be the same" in capsys.readouterr().err
    assert main(["coordinator", "--status", address]) == 1
    error = capsys.readouterr().err
    assert f"Nothing answers at {address}" in error and len(error.splitlines()) == 1


def test_managers_of_torchft_are_served_only_if_that_is_chosen() -> None:
    from torchft.coordination import LighthouseClient

    def heartbeat(address: str) -> None:
        LighthouseClient(f"http://{address}", timedelta(seconds=30)).heartbeat("a")

    # They speak different protocols; which of the two notices first differs.
    with (
        _coordinator() as (_, address),
        pytest.raises((RuntimeError, TimeoutError), match="transport error|operation was canceled"),
    ):
        heartbeat(address)
    with _coordinator("--serve-torchft") as (process, address):
        heartbeat(address)
        with pytest.raises(RpcError, match="was started with --serve-torchft"):
            coordinator_status(address, TOKEN, 30)
        process.terminate()
        _, log = process.communicate(timeout=60)
        assert "accepts unauthenticated clients at 127.0.0.1:0" in log


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
    with _coordinator() as (_, address):
        assert "another process listens there" in _fails("--bind", address)
    assert "min_replicas = 0 is too small" in _fails("--min-replicas", "0")
    assert "has 5 characters of at least 16" in _fails(token="short")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--status=a:1", "--bind=b:1"], "--status asks another coordinator: omit --bind"),
        (["--status=a:1", "--join-timeout-ms=5"], "omit --join-timeout-ms"),
        (["--status=a:1", "--serve-torchft"], "omit --serve-torchft"),
        (["--json"], "--json is the form of --status HOST:PORT"),
        (["--serve-torchft", "--sole"], "--serve-torchft serves no machines"),
        (["--min-replicas=x"], "invalid int value: 'x'"),
    ],
)
def test_options_that_exclude_each_other(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coordinator", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line


def test_no_torch_is_imported() -> None:
    heavy = {"torch", "torchft", "numpy", "pydantic", "google.protobuf.json_format"}
    code = (
        "import sys\n"
        "from torchtitan_lite.cli import coordinator, parsers\n"
        "from torchtitan_lite.fault_tolerance.lighthouse import server\n"
        "from torchtitan_lite.fault_tolerance.supervision.coordinator import client, status\n"
        "from torchtitan_lite.fault_tolerance.supervision.coordinator import server\n"
        f"print(sorted(set({sorted(heavy)}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
