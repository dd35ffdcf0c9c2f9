"""A stranger that opens thousands of connections to the servers of a run costs it no step."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import free_port
from tests.harness import launch
from tests.resilience.test_launch import killed_at_exit, output_of, processes_of_run, start
from torchtitan_lite.distributed.rpc.protocol import ClientStream, Identity
from torchtitan_lite.fault_tolerance.lighthouse import member
from torchtitan_lite.fault_tolerance.replica import replica_server

_OPENINGS = [
    ClientStream(Identity(service, "another secret", "")).opening
    for service in (member.SERVICE, replica_server.SERVICE)
]
"""What a client says first to the lighthouse, and to the coordinator of a replica."""
_NUM_CONNECTIONS = 2000
_MAX_FILES = 1024
_STEPS = 300


def _ports_of_calls(process: psutil.Process) -> list[tuple[str, int]]:
    found = [
        (one.laddr.ip, one.laddr.port)
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
    return [address for address in found if any(_answers(address, text) for text in _OPENINGS)]


def _answers(address: tuple[str, int], opening: bytes) -> bool:
    with suppress(OSError), socket.create_connection(address, 1.0) as stream:
        stream.settimeout(1.0)
        stream.sendall(opening)
        return stream.recv(8) == opening[:8]
    return False


def _num_replicas(metrics: Path) -> int:
    steps = launch.steps_of(metrics)
    return steps[-1]["num_replicas"] if steps else 0


@contextmanager
def _flooded(address: tuple[str, int]) -> Iterator[None]:
    """Hold connections, as far as the server does not close them."""
    held: list[socket.socket] = []
    try:
        for _ in range(_NUM_CONNECTIONS):
            held.append(socket.create_connection(address, 5.0))
            # It may be displaced at once.
            with suppress(OSError):
                held[-1].sendall(_OPENINGS[len(held) % 2])
        yield
    finally:
        for one in held:
            one.close()


@pytest.mark.matrix
def test_a_flood_of_connections_costs_no_step(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start(folder, log, f"--training.steps={_STEPS}", "--metrics.prometheus_port=0")
    # Inherited by all processes of the run.
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    metrics = folder / "replica_000"
    with killed_at_exit(process, folder):
        launch.wait_until(lambda: _num_replicas(metrics) == 2, 120)
        began_s = time.time()
        before = {one.pid for one in processes_of_run(folder)}
        lighthouse = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if "coordinator" in one.cmdline()
        ]
        servers = [*lighthouse, *processes_of_run(folder)]
        addresses = {address for one in servers for address in _ports_of_calls(one)}
        # The lighthouse, and the coordinator of each replica.
        assert len(addresses) == 3
        for address in sorted(addresses):
            step = launch.steps_of(metrics)[-1]["step"]
            with _flooded(address):
                time.sleep(1.0)
                most = max(one.num_fds() for one in servers)
                assert most < _MAX_FILES // 2, most
                done = step >= _STEPS - 20
                if not done:
                    launch.wait_for_step(metrics, step + 10, process, log)
        assert {one.pid for one in processes_of_run(folder)} >= before
        text = output_of(process, log, 240)
    steps = [line["step"] for line in launch.steps_of(metrics)]
    # It may have joined after the other replica has taken the first step.
    assert steps == list(range(steps[0], _STEPS + 1)), text[-3000:]
    events = [one for one in launch.events_of(metrics) if one["time"] >= began_s]
    assert not {one["event"] for one in events} & {"quorum", "healed", "step_failed"}, events


@pytest.mark.matrix
def test_without_free_descriptors_training_continues(tmp_path: Path) -> None:
    """What works beside training fails, and works again afterwards."""
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = [
        *(one for one in launch.SMALL if "tensorboard" not in one),
        f"--job.dump_folder={folder}",
        "--training.steps=600",
        "--metrics.log_freq=1",
        f"--metrics.prometheus_port={free_port()}",
        "--checkpoint.interval=10",
        "--publish.enable=true",
        "--publish.address=127.0.0.1",
        "--publish.every_steps=3",
    ]
    process = launch.start(1, arguments, log, TORCHTITAN_LITE_TOKEN="0" * 32)
    try:
        launch.wait_for_step(folder, 20, process, log)
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        for _ in range(3):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1, limits[1]))
            time.sleep(1.5)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
            time.sleep(1.0)
        assert process.wait(120) == 0, log.read_text()[-4000:]
    finally:
        launch.end(process)
    assert [line["step"] for line in launch.steps_of(folder)] == list(range(1, 201))
