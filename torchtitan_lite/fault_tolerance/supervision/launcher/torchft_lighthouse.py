"""`python -m torchtitan_lite.fault_tolerance.supervision.launcher.torchft_lighthouse --bind
HOST:PORT --min-replicas N`: torchft's lighthouse, for the launcher.

Unlike torchft's own command `torchft_lighthouse`, it prints the port on which it listens, and does
not wait a minute for replicas that may never come.
"""

import argparse
import importlib.util
import signal
import sys
from importlib.machinery import PathFinder
from types import ModuleType

_QUORUM_TICK_MS = 50
HEARTBEAT_TIMEOUT_MS = 1000


def main(argv: list[str]) -> int:
    """Run a lighthouse until a signal ends it, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.fault_tolerance.supervision.launcher.torchft_lighthouse"
    )
    parser.add_argument("--bind", required=True, metavar="HOST:PORT")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--join-timeout-ms", type=int, required=True)
    options = parser.parse_args(argv)
    host = options.bind.rpartition(":")[0]
    try:
        server = _compiled_half().LighthouseServer(
            options.bind,
            options.min_replicas,
            join_timeout_ms=options.join_timeout_ms,
            quorum_tick_ms=_QUORUM_TICK_MS,
            heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        )
    except Exception as error:
        print(f"The lighthouse cannot listen on {options.bind}: {error}", file=sys.stderr)
        return 1
    port = server.address().rpartition(":")[2]
    print(f"listening on {host}:{port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()
    return 0


def _compiled_half() -> ModuleType:
    """Import torchft's compiled module alone: the package imports torch, which takes seconds while
    all replicas wait."""
    package = importlib.util.find_spec("torchft")
    places = None if package is None else package.submodule_search_locations
    spec = PathFinder.find_spec("torchft._torchft", places) if places else None
    if spec is None or spec.loader is None:
        raise ImportError("torchft is not installed: pip install torchft")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main(sys.argv[1:]))
