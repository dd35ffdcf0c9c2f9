"""The rig itself: what the faults of a link do to connections."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.network.namespaces import Network, Unavailable, unavailable_reason

_REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

_SERVER = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        while part := connection.recv(1 << 16):
            connection.sendall(part)
"""
_CLIENT = """
import socket, sys, time
begin = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 4000), timeout=3) as connection:
        connection.settimeout(float(sys.argv[3]))
        for _ in range(int(sys.argv[2])):
            connection.sendall(bytes(10_000))
            received = 0
            while received < 10_000:
                received += len(connection.recv(1 << 16))
    print(time.monotonic() - begin)
except OSError:
    print("null")
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["a", "b", "c"]) as network:
        servers = [
            subprocess.Popen(
                [*network.command(name), sys.executable, "-c", _SERVER], stdout=subprocess.PIPE
            )
            for name in ("a", "b", "c")
        ]
        try:
            for server in servers:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
            yield network
        finally:
            for server in servers:
                server.kill()
                server.communicate()


def _echo_s(
    network: Network, source: str, target: str, rounds: int = 1, timeout_s: float = 3.0
) -> float | None:
    """Return the time in which 10 kB return so many times; None if there is no connection."""
    command = [*network.command(source), sys.executable, "-c", _CLIENT]
    command += [network.address(target), str(rounds), str(timeout_s)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _connected(network: Network) -> set[str]:
    pairs = ("ab", "ba", "ac", "ca", "bc", "cb")
    return {pair for pair in pairs if _echo_s(network, pair[0], pair[1]) is not None}


@pytest.mark.matrix
def test_links_are_cut_and_mended(network: Network) -> None:
    everything = {"ab", "ba", "ac", "ca", "bc", "cb"}
    assert _connected(network) == everything
    network.unplug("a")
    assert _connected(network) == {"bc", "cb"}
    network.plug("a")
    network.cut("b", "c")
    assert _connected(network) == {"ab", "ba", "ac", "ca"}
    network.mend()
    assert _connected(network) == everything


@pytest.mark.matrix
def test_one_direction_is_blocked(network: Network) -> None:
    received = "/sys/class/net/eth0/statistics/rx_packets"

    def packets(name: str) -> int:
        command = [*network.command(name), "cat", received]
        return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    network.block("a", "b")
    before = packets("a")
    # No connection is possible in either direction, but what b sends arrives at a.
    assert _connected(network) == {"ac", "ca", "bc", "cb"}
    assert packets("a") > before
    network.mend()


def test_packets_are_lost(network: Network) -> None:
    times_s = []
    for percent in (None, 5):
        if percent:
            network.lose("b", percent)
        times_s.append(_echo_s(network, "a", "b", 300, 20))
    network.mend()
    without, with_losses = times_s
    assert without is not None and with_losses is not None
    # A retransmission takes longer than a round trip on one machine.
    assert with_losses > without


def test_the_rate_is_limited() -> None:
    with Network(["a", "b"]) as network:
        try:
            network.limit("a", 1000)
        except Unavailable as error:
            pytest.skip(str(error))
        with subprocess.Popen(
            [*network.command("b"), sys.executable, "-c", _SERVER], stdout=subprocess.PIPE
        ) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                time_s = _echo_s(network, "a", "b", 20, 20)
            finally:
                server.kill()
    # 1.6 Mbit in each direction at 1 Mbit/s. The directions alternate, and while one is idle, it
    # gathers a burst.
    assert time_s is not None
    assert 1.2 < time_s < 15


def test_hosts_have_their_own_names() -> None:
    script = (
        "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    )

    def name(hostname: str | None) -> str:
        command = [*network.command("a", hostname), sys.executable, "-c", script]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()

    with Network(["a"]) as network:
        assert name(None) == f"a {network.address('a')}"
        network.set_hosts("a", "127.0.1.1 myhost\n")
        assert name("myhost") == "myhost 127.0.1.1"


def test_nothing_remains_after_a_failure() -> None:
    with pytest.raises(Unavailable), Network(["a", "a name that is too long"]):
        pass
    listed = subprocess.run(["ip", "netns", "list"], stdout=subprocess.PIPE, check=True, text=True)
    assert f"tlite-{os.getpid()}-" not in listed.stdout
    assert not list(Path("/etc").glob(f"netns/tlite-{os.getpid()}-*"))
