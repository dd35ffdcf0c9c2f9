"""Rate at which a replica receives the state when it heals, against a bare socket.

The bare socket carries the same bytes between the same two processes by `sendfile` and `recv_into`.
Both fill memory that is allocated already. They alternate.

As a program, it is the donor: it prints the URL of its state, the port of the bare bytes and a
checksum of the tensors, and ends with its standard input.
"""

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import xxhash

from benchmarks.harness import Comparison, Result
from benchmarks.processes import CHECKOUT, ENVIRONMENT, ChildFailed
from benchmarks.worker import alternate, timed
from torchtitan_lite.checkpoint import tensor_bytes
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint
from torchtitan_lite.distributed.rpc.state_server import StateServer
from torchtitan_lite.fault_tolerance.replica.healing.client import receive_state
from torchtitan_lite.fault_tolerance.replica.healing.live_state import LiveState
from torchtitan_lite.fault_tolerance.replica.healing.transport import PURPOSE

_PROGRESS = 1
_ADDRESS = "127.0.0.1"
_GOAL = 0.5
_TIMEOUT_S = 30.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HealCase:
    """A state, and how often it is received."""

    num_tensors: int
    rows: int
    """Rows of each tensor, which is square."""
    warmup_rounds: int
    rounds: int


class FixedState:
    """A training state of square tensors, about as large as those of a layer."""

    step = _PROGRESS
    cursor = _PROGRESS

    def __init__(self, num_tensors: int, rows: int, *, seed: int | None) -> None:
        """Random tensors, or zeros without a seed."""
        self._tensors = {
            f"model.{index:04d}": torch.zeros(rows, rows) for index in range(num_tensors)
        }
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for tensor in self._tensors.values():
                tensor.normal_(generator=generator)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def values(self) -> dict[str, Any]:
        return {}

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: all tensors exist."""

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Do nothing: there are none."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def checksum(self) -> str:
        digest = xxhash.xxh3_64()
        for tensor in self._tensors.values():
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()


def measure_heal(case: HealCase) -> Result:
    """Start a donor and receive its state by both."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "benchmarks.heal"]
    command += ["--tensors", str(case.num_tensors), "--rows", str(case.rows)]
    with subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **ENVIRONMENT, "TORCHTITAN_LITE_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ChildFailed("The donor ended.")
        donor = json.loads(line)
        state = FixedState(case.num_tensors, case.rows, seed=None)
        connections = FaultToleranceConfig().heal_connections
        endpoint = PeerEndpoint(donor["url"], token, PURPOSE, _TIMEOUT_S, connections)
        buffer = memoryview(bytearray(state.num_bytes))
        variants = {
            "ours": partial(receive_state, endpoint, _PROGRESS, state),
            "socket": partial(_receive_bytes, donor["port"], buffer),
        }
        calls = timed(variants, barrier=lambda: None)
        seconds = alternate(calls, case.rounds, warmup_rounds=case.warmup_rounds)
        process.stdin.close()
    num_mib = state.num_bytes / _MIB
    comparison = Comparison(f"heal of {num_mib:.0f} MiB")
    comparison.same("checksum", state.checksum(), donor["checksum"])
    comparison.same("threads", torch.get_num_threads(), donor["threads"])
    return comparison.ratio(
        f"rate by {connections} connections",
        "MiB/s",
        num_mib / median(seconds["ours"]),
        floor=num_mib / median(seconds["socket"]),
        goal=_GOAL,
        more_is_better=True,
    )


def _receive_bytes(port: int, buffer: memoryview) -> None:
    with socket.create_connection((_ADDRESS, port), _TIMEOUT_S) as connection:
        filled = 0
        while filled < len(buffer):
            count = connection.recv_into(buffer[filled:])
            if not count:
                raise ChildFailed("The donor closed the bare socket early.")
            filled += count


def _serve_bytes(listener: socket.socket, state: FixedState) -> None:
    """Send the bytes of the state from memory over each connection."""
    with open(os.memfd_create("state"), "w+b") as file:
        for tensor in state.tensors().values():
            file.write(tensor_bytes(tensor))
        file.flush()
        while True:
            connection, _ = listener.accept()
            with connection:
                file.seek(0)
                connection.sendfile(file)


def main() -> None:
    """Serve a state until standard input ends."""
    parser = argparse.ArgumentParser(description="Serve a state to a healing replica.")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    state = FixedState(options.tensors, options.rows, seed=0)
    server = StateServer(_ADDRESS, os.environ["TORCHTITAN_LITE_TOKEN"], PURPOSE)
    server.offer(_PROGRESS, LiveState.of(state))
    listener = socket.create_server((_ADDRESS, 0))
    threading.Thread(target=_serve_bytes, args=(listener, state), daemon=True).start()
    donor = {
        "url": server.url,
        "port": listener.getsockname()[1],
        "checksum": state.checksum(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(donor), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
