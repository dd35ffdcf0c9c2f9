"""Faults of the network between replicas.

No process ends, a cut of T seconds costs at most T + 3 s, and losses, samples and the final state
equal those of an undisturbed run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.resilience.network.hosts import (
    NetworkReplicas,
    lighthouse,
    network_replicas,
    replica,
)
from tests.resilience.network.namespaces import Network, Unavailable, unavailable_reason

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    # With the undisturbed run of equally many steps.
    pytest.mark.timeout(600),
]

_RECOVERY_S = 6.0
"""The most that a cut costs beyond its own duration; 3 s on a quiet machine."""
_PAUSE_S = 11.0
"""The longest pause of the replicas that remain when others are cut off for longer: the timeout of
a collective, 5 s, and 6 s; 3 s on a quiet machine."""


def _unplug(network: Network) -> None:
    network.unplug(replica(1))


def _plug(network: Network) -> None:
    network.plug(replica(1))


def _flap(network: Network) -> None:
    for _ in range(5):
        _unplug(network)
        time.sleep(1)
        _plug(network)
        time.sleep(1)


@dataclass(frozen=True)
class Fault:
    """A fault of the network, for some time."""

    begin: Callable[[Network], None]
    duration_s: float
    end: Callable[[Network], None] = Network.mend
    num_replicas: int = 2
    remaining: tuple[int, ...] = ()
    """Replicas that continue meanwhile."""


FAULTS = {
    "link down for 3 s": Fault(_unplug, 3, _plug),
    "link down for 20 s": Fault(_unplug, 20, _plug, remaining=(0,)),
    "link down for 90 s": Fault(_unplug, 90, _plug, remaining=(0,)),
    "one direction": Fault(lambda network: network.block(replica(0), replica(1)), 20),
    "pair cut": Fault(lambda network: network.cut(replica(0), replica(1)), 20),
    "pair cut among three": Fault(
        lambda network: network.cut(replica(1), replica(2)), 40, num_replicas=3, remaining=(0,)
    ),
    "lighthouse cut from one": Fault(
        lambda network: network.cut(lighthouse(0), replica(1)), 20, remaining=(0,)
    ),
    "flapping": Fault(_flap, 0, _plug),
    "loss of 5 %": Fault(lambda network: network.lose(replica(1), 5), 20),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_own_time(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with network_replicas(tmp_path / "run", fault.num_replicas) as run:
        run.train_until_all_participate()
        begin = time.time()
        fault.begin(run.network)
        time.sleep(fault.duration_s)
        end = time.time()
        fault.end(run.network)
        recovery_s = run.wait_until_together(end)
        pauses_s = [run.longest_pause_s(number, begin, end) for number in run.running]
        print(f"together again after {recovery_s:.1f} s, longest pauses meanwhile {pauses_s} s")
        for number in fault.remaining:
            assert run.longest_pause_s(number, begin, end) < _PAUSE_S, run.report()
        assert recovery_s < _RECOVERY_S
        run.check_against_undisturbed_run(tmp_path)


@pytest.mark.matrix
def test_a_cut_during_a_save(tmp_path: Path) -> None:
    with network_replicas(tmp_path / "run", 2) as run:
        run.train_until_all_participate(45)
        _wait_for(run, lambda: _last_step(run, 0) % 50 == 49 or _last_step(run, 0) > 95)
        run.network.unplug(replica(1))
        time.sleep(10)
        end = time.time()
        run.network.plug(replica(1))
        assert run.wait_until_together(end) < _RECOVERY_S
        run.check_against_undisturbed_run(tmp_path)


@pytest.mark.matrix
def test_a_cut_during_healing(tmp_path: Path) -> None:
    with network_replicas(tmp_path / "run", 2) as run:
        run.train_until_all_participate()
        run.kill(1)
        # The state, 31 MB, takes more than 10 s.
        _limit(run, 20_000)
        run.start(1)
        sent_before = run.network.sent_bytes(replica(0))
        _wait_for(run, lambda: run.network.sent_bytes(replica(0)) - sent_before > 8_000_000)
        run.network.unplug(replica(1))
        time.sleep(5)
        end = time.time()
        run.network.plug(replica(1))
        # The rest of the transfer.
        assert run.wait_until_together(end) < _RECOVERY_S + 15
        run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0]
        assert "healed" in run.events(1)


@pytest.mark.matrix
def test_a_slow_link(tmp_path: Path) -> None:
    with network_replicas(tmp_path / "run", 2) as run:
        patient = "--fault_tolerance.process_group_timeout_ms=300000"
        run.train_until_all_participate(more=[patient])
        _limit(run, 1_000)
        begin = time.time()
        # A step exchanges the gradients, 10 MB in float64, in 84 s.
        while not any(step["time"] > begin + 20 for step in run.steps(0)):
            run.check_alive()
            assert time.time() < begin + 240, run.report()
            time.sleep(0.2)
        run.network.unlimit(replica(0))
        run.check_against_undisturbed_run(tmp_path)


@pytest.mark.matrix
def test_latency(tmp_path: Path) -> None:
    with network_replicas(tmp_path / "run", 2) as run:
        try:
            run.network.delay(replica(1), 50)
        except Unavailable as error:
            pytest.skip(f"latency: {error}")
        run.train_until_all_participate(20)
        run.check_against_undisturbed_run(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "hosts",
    ["127.0.0.1 localhost\n127.0.1.1 myhost\n", "127.0.0.1 localhost\n"],
    ids=["the name is a loopback address", "the name cannot be resolved"],
)
def test_wrong_host_names(hosts: str, tmp_path: Path) -> None:
    with network_replicas(tmp_path / "run", 2) as run:
        for number in (0, 1):
            run.network.set_hosts(replica(number), hosts)
            run.hostnames[number] = "myhost"
        run.train_until_all_participate()
        run.check_against_undisturbed_run(tmp_path)


def _last_step(run: NetworkReplicas, number: int) -> int:
    return max(run.losses(number), default=0)


def _wait_for(run: NetworkReplicas, condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, run.report()
        time.sleep(0.005)


def _limit(run: NetworkReplicas, kbit_per_s: int) -> None:
    try:
        run.network.limit(replica(0), kbit_per_s)
    except Unavailable as error:
        pytest.skip(f"a limited rate: {error}")
