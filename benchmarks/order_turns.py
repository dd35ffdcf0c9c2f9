"""The order of positions under head-tail balancing: the product's, against a Python loop.

Each side makes it several times in its turn, so that memory is warm to both: what the machine takes
to hand out new pages tells nothing of either, and may be more than the rest.

Started by `benchmarks.parallel`.
"""

import argparse
import json
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_lite.parallel.context import sequence_order

_CALLS = 5
# The cache would give the second call the result of the first.
_vectorised = sequence_order.__wrapped__


def looped(length: int, num_ranks: int) -> list[int]:
    """The same positions, one by one."""
    piece_length = length // (2 * num_ranks)
    order = []
    for rank in range(num_ranks):
        for piece in (rank, 2 * num_ranks - 1 - rank):
            for offset in range(piece_length):
                order.append(piece * piece_length + offset)
    return order


def main() -> None:
    """Take turns, then write seconds and checksums to PATH."""
    parser = argparse.ArgumentParser(description="Take turns of two ways to order positions.")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    length, num_ranks = given.length, given.ranks
    ours_s, peer_s = [], []
    # The first round is the warm-up.
    for _ in range(given.rounds + 1):
        ours_s.append(_cpu_seconds_per_call(lambda: _vectorised(length, num_ranks, True)))
        peer_s.append(_cpu_seconds_per_call(lambda: looped(length, num_ranks)))
    ours, peer = _vectorised(length, num_ranks, True), looped(length, num_ranks)
    measured: dict[str, dict[str, Any]] = {
        "ours": {"seconds": ours_s[1:], "checksum": zlib.crc32(ours.numpy().tobytes())},
        "peer": {"seconds": peer_s[1:], "checksum": zlib.crc32(array("q", peer).tobytes())},
    }
    given.path.write_text(json.dumps(measured), encoding="utf-8")


def _cpu_seconds_per_call(make: Callable[[], object]) -> float:
    began_s = time.process_time()
    for _ in range(_CALLS):
        make()
    return (time.process_time() - began_s) / _CALLS


if __name__ == "__main__":
    main()
