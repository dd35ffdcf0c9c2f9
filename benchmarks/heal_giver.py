"""The process that gives a state: as a replica does, and as bare bytes by `sendfile`.

It prints the URL of its state, the port of the bytes and a checksum of the tensors, and ends when
its standard input does. Started by `benchmarks.heal_rate`.
"""

import argparse
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from torchtitan_lite.checkpoint import tensor_bytes
from torchtitan_lite.replica.healing.live_state import LiveState
from torchtitan_lite.replica.healing.transport import StateServer

PROGRESS = 1
_ADDRESS = "127.0.0.1"


class FixedState:
    """Tensors of about the sizes of a layer, which count as the state of a run."""

    step = PROGRESS
    cursor = PROGRESS

    def __init__(self, num_tensors: int, rows: int, *, seed: int | None) -> None:
        """Without a seed they are zero."""
        self._tensors = {
            f"model.{number:04d}": torch.zeros(rows, rows) for number in range(num_tensors)
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
        """All are there."""

    def load_values(self, values: Mapping[str, Any]) -> None:
        """There are none."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def checksum(self) -> str:
        digest = xxhash.xxh3_64()
        for tensor in self._tensors.values():
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()


def main() -> None:
    """Give until nobody listens any more."""
    parser = argparse.ArgumentParser(description="Give a state to benchmarks.heal_rate.")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    given = parser.parse_args()
    state = FixedState(given.tensors, given.rows, seed=0)
    server = StateServer(_ADDRESS, os.environ["TORCHTITAN_LITE_TOKEN"])
    server.offer(PROGRESS, LiveState.of(state))
    listener = socket.create_server((_ADDRESS, 0))
    threading.Thread(target=_give_bytes, args=(listener, state), daemon=True).start()
    told = {
        "url": server.url,
        "port": listener.getsockname()[1],
        "checksum": state.checksum(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()


def _give_bytes(listener: socket.socket, state: FixedState) -> None:
    """The same bytes from memory, to each that connects."""
    with open(os.memfd_create("state"), "w+b") as file:
        for tensor in state.tensors().values():
            file.write(tensor_bytes(tensor))
        file.flush()
        while True:
            connection, _ = listener.accept()
            with connection:
                file.seek(0)
                connection.sendfile(file)


if __name__ == "__main__":
    main()
