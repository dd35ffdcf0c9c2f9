"""Bytes a second that a replica receives when it heals, against a bare socket of the same machine
that carries the same bytes from one process to the other (`sendfile`, `recv_into`).

Both fill memory that is there already. They take turns.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.agreement import Agreement
from benchmarks.heal_giver import PROGRESS, FixedState
from benchmarks.processes import CHECKOUT, THREADS, ChildFailed
from benchmarks.rows import Row, compare
from torchtitan_lite.replica.healing.client import PeerEndpoint, receive_state
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

_GOAL = 0.5
_TIMEOUT_S = 30.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HealCase:
    """A state, and how often it is received."""

    num_tensors: int
    rows: int
    """Of each tensor, which is square."""
    warmup_rounds: int
    rounds: int


def measure_heal(case: HealCase) -> tuple[Row, Agreement]:
    """Run the rounds."""
    token = secrets.token_hex(16)
    own = {"TORCHTITAN_LITE_TOKEN": token, "OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-m", "benchmarks.heal_giver"]
    command += ["--tensors", str(case.num_tensors), "--rows", str(case.rows)]
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as giver:
        assert giver.stdin is not None and giver.stdout is not None
        line = giver.stdout.readline()
        if not line:
            raise ChildFailed("Who gives the state has ended.")
        told = json.loads(line)
        state = FixedState(case.num_tensors, case.rows, seed=None)
        connections = FaultToleranceConfig().heal_connections
        endpoint = PeerEndpoint(told["url"], token, _TIMEOUT_S, connections)
        buffer = memoryview(bytearray(state.num_bytes))
        heal_s, raw_s = [], []
        for _ in range(case.warmup_rounds + case.rounds):
            began_s = time.perf_counter()
            receive_state(endpoint, PROGRESS, state)
            heal_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            _receive_bytes(told["port"], buffer)
            raw_s.append(time.perf_counter() - began_s)
        giver.stdin.close()
    num_mib = state.num_bytes / _MIB
    name = f"heal of {num_mib:.0f} MiB"
    agreement = Agreement(name)
    agreement.same("checksum", state.checksum(), told["checksum"])
    agreement.same("threads", torch.get_num_threads(), told["threads"])
    row = compare(
        case=name,
        metric=f"rate by {connections} connections",
        unit="MiB/s",
        ours=num_mib / median(heal_s[case.warmup_rounds :]),
        floor=num_mib / median(raw_s[case.warmup_rounds :]),
        goal=_GOAL,
        comparable=agreement.holds,
        more_is_better=True,
    )
    return row, agreement


def _receive_bytes(port: int, buffer: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        filled = 0
        while filled < len(buffer):
            count = connection.recv_into(buffer[filled:])
            if not count:
                raise ChildFailed("The bare bytes broke off.")
            filled += count
