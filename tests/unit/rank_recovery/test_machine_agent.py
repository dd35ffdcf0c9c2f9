"""Checkpoint writers end with the lease of their machine."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import launch
from torchtitan_lite.launcher.processes import WRITER_MODULE, Subreaper, command_line
from torchtitan_lite.rank_recovery import machine_agent
from torchtitan_lite.rank_recovery.machine_agent import MachineAgent
from torchtitan_lite.rank_recovery.rank_process import RankProcess
from torchtitan_lite.rendezvous.link import RendezvousLink
from torchtitan_lite.rendezvous.messages import Phase
from torchtitan_lite.rendezvous.server import rendezvous_server
from torchtitan_lite.rendezvous.timing import LEASE_S, PARK_S

_SECRET = "a secret of the tests"


class _Agent(MachineAgent):
    """Shows what a run does within the base class."""

    def pause(self) -> None:
        """Run the main loop once."""
        self._pause()

    def report(self, phase: Phase) -> None:
        """Change the phase that is reported."""
        self._link.update(phase=phase)

    def end(self) -> None:
        """End the processes, and leave."""
        self._shutdown()

    def park_deadline_s(self) -> float:
        """Return the deadline of an order that comes now."""
        return self._park_deadline_s(time.monotonic())


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line of a checkpoint writer."""
    program = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program, "-m", WRITER_MODULE])
    # Its command line is that of this process until it has started.
    launch.wait_until(lambda: command_line(process.pid)[-1:] == [WRITER_MODULE], 10)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Agent]:
    """An agent without processes, which has a lease."""
    # The agents of other tests run in processes of their own.
    monkeypatch.setattr(machine_agent, "become_subreaper", lambda: None)
    # It would reap processes of other tests.
    monkeypatch.setattr(Subreaper, "reap", lambda *ignored: None)
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    with rendezvous_server("127.0.0.1:0", _SECRET) as server:
        link = RendezvousLink(
            server.address,
            _SECRET,
            address="127.0.0.1",
            name="a",
            run_id="run",
            num_machines=1,
            num_ranks=1,
            fingerprint="1-abc",
        )
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        yield _Agent(lambda: RankProcess([], {}), 1, 0, link=link, join_timeout_s=60, requests=[])
        link.leave()


def test_writers_end_first_when_the_lease_ends(
    agent: _Agent, writer: subprocess.Popen[bytes]
) -> None:
    agent.pause()
    assert agent.park_deadline_s() - time.monotonic() > PARK_S
    # Without it, reports end, and the lease does.
    time.sleep(LEASE_S + PARK_S)
    assert writer.poll() is None
    assert agent.park_deadline_s() < time.monotonic() + PARK_S
    agent.pause()
    assert writer.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("phase", [Phase.PARKED, Phase.ENDED])
def test_writers_end_before_a_machine_leaves_unless_it_has_finished(
    phase: Phase, agent: _Agent, writer: subprocess.Popen[bytes]
) -> None:
    agent.report(phase)
    agent.end()
    if phase is Phase.ENDED:
        time.sleep(0.5)
        assert writer.poll() is None
    else:
        assert writer.wait(5) == -signal.SIGKILL
