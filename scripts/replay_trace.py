r"""Replay a trace of machines that come and go as the slots file of `torchtitan-lite launch`.

python -m scripts.replay_trace TRACE --slots-file FILE \
    --replicas N --ranks-per-replica N [--speed X]

The trace has the format of Oobleck's simulator; each of its machines runs one rank. The file is
replaced as a whole at each change, as a cluster manager would do it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.tools.failure_model import Trace, read_trace, slots


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Replay a trace of machines as a slots file.")
    add = parser.add_argument
    add("trace", type=Path, help="lines MILLISECONDS,add,NODE and MILLISECONDS,remove,NODE")
    add("--slots-file", type=Path, required=True, help="as for torchtitan-lite launch")
    add("--replicas", type=int, required=True, help="number of replicas")
    add("--ranks-per-replica", type=int, required=True, help="most ranks of a replica")
    add("--speed", type=float, default=1.0, help="times faster than the trace (default 1)")
    options = parser.parse_args()
    if min(options.replicas, options.ranks_per_replica) < 1 or not options.speed > 0:
        parser.error("--replicas and --ranks-per-replica must be at least 1, --speed more than 0")
    try:
        trace = read_trace(options.trace)
        replay(
            trace, options.slots_file, options.replicas, options.ranks_per_replica, options.speed
        )
    except (DataError, OSError) as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 2
    return 0


def replay(
    trace: Trace,
    path: Path,
    num_replicas: int,
    ranks: int,
    speed: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write the slots of each time of the trace, and print them. Raises OSError."""
    began_s, before = clock(), None
    for at_s, content in slots(trace, num_replicas, ranks):
        if content == before:
            continue
        before = content
        sleep(max(0.0, began_s + at_s / speed - clock()))
        _write(path, content)
        print(f"{at_s:,.0f} s: {json.dumps(content)}", flush=True)


def _write(path: Path, content: Mapping[str, int]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
