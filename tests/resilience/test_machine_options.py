"""A machine that does not belong to the run ends with one clear error, and so does one that waits
for others in vain."""

import re
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.harness import launch
from tests.harness.ranks import run_command
from torchtitan_lite.fault_tolerance.supervision.coordinator.remote_link import RemoteLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.server import coordinator_server

_TOKEN = "a secret of the tests"
_ARGUMENTS = (*launch.SMALL, "--training.steps=5", "--training.global_batch_size=24")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """The address of a coordinator at which one machine of two has joined."""
    with coordinator_server("127.0.0.1:0", _TOKEN) as server:
        link = RemoteLink(
            server.address,
            _TOKEN,
            address="127.0.0.1",
            name="the first machine",
            run_id="default",
            num_machines=2,
            num_ranks=1,
            fingerprint="2-0123456789ab",
        )
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        yield server.address
        link.leave()


Fails = Callable[..., str]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Return a function that starts a machine, and returns the line that it prints after its
    warnings."""

    def fails(endpoint: str, *more: str, token: str = _TOKEN, num_warnings: int = 0) -> str:
        monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", token)
        own = (f"--rdzv-endpoint={endpoint}", *_ARGUMENTS, *more)
        lines = run_command("train", *own, status=1).splitlines()
        assert len(lines) == num_warnings + 1, lines
        return lines[-1]

    return fails


@pytest.mark.matrix
def test_a_machine_of_another_run_names_the_difference(endpoint: str, fails: Fails) -> None:
    line = fails(endpoint, "--nnodes=2")
    error = "fingerprint is 2-[0-9a-f]+ here, but 2-0123456789ab on the first"
    assert re.search(error, line), line


def test_fault_tolerance_without_replicas_is_rejected(fails: Fails) -> None:
    line = fails("127.0.0.1:1", "--nnodes=2", "--fault_tolerance.enable=true")
    assert "fault_tolerance.enable is true: give --replicas R" in line


@pytest.mark.matrix
def test_another_token_is_rejected(endpoint: str, fails: Fails) -> None:
    # Anybody on the way could have answered: it is reported, and asks until its time limit.
    more = ("--nnodes=2", "--rdzv-timeout-s=3")
    line = fails(endpoint, *more, token="another secret of them", num_warnings=1)
    assert "TORCHTITAN_LITE_TOKEN must be the same" in line


def test_a_token_that_is_too_short_is_rejected(endpoint: str, fails: Fails) -> None:
    assert "has 5 characters of at least 16" in fails(endpoint, "--nnodes=2", token="short")


@pytest.mark.matrix
def test_too_few_machines_are_named(fails: Fails) -> None:
    with coordinator_server("127.0.0.1:0", _TOKEN) as server:
        line = fails(server.address, "--nnodes=3", "--rdzv-timeout-s=6")
    assert "1 of 3 machines have joined in 6 s (127.0.0.1 (process" in line


@pytest.mark.matrix
def test_a_coordinator_that_does_not_answer_is_named(fails: Fails) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    line = fails(endpoint, "--nnodes=2", "--rdzv-timeout-s=1")
    assert f"the coordinator cannot be reached: Nothing answers at {endpoint}" in line
