"""`python -m torchtitan_lite.fault_tolerance.lighthouse`: a lighthouse in a process of its own.

It prints the address on which it listens, and exits with status 0 on SIGTERM and SIGINT. The
environment variable TORCHTITAN_LITE_TOKEN is the secret of its replicas. Without it the lighthouse
serves torchft's managers, unauthenticated.
"""

import argparse
import os
import signal
import sys

from torchtitan_lite.core.errors import LighthouseError
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings

_ENDING = (signal.SIGTERM, signal.SIGINT)


def main(arguments: list[str] | None = None) -> int:
    """Run a lighthouse until a signal and return the exit status."""
    options = _parser().parse_args(arguments)
    # Blocked in all threads and received by sigwait, so that no signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    configure_logging()
    # Set before the import of gRPC, which would otherwise write its own log lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService
    from torchtitan_lite.fault_tolerance.lighthouse.servicer import first_quorum_id

    try:
        settings = QuorumSettings(
            options.min_replicas, options.join_timeout_ms, options.heartbeat_timeout_ms
        )
        token = os.environ.get(TOKEN, "")
        if not token:
            logger.warning(
                "TORCHTITAN_LITE_TOKEN is not set: this lighthouse serves torchft's managers, and "
                "accepts unauthenticated clients at %s.",
                options.bind,
            )
        elif problem := secret_problem(token):
            raise LighthouseError(problem)
        first_id = first_quorum_id()
        with LighthouseService(options.bind, settings, token, first_id=first_id) as service:
            print(f"listening on {service.address}", flush=True)
            signal.sigwait(_ENDING)
    except LighthouseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    default = QuorumSettings()
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.fault_tolerance.lighthouse",
        description="Form the quorums of replicas. TORCHTITAN_LITE_TOKEN is the secret that they "
        "share; without it, torchft's managers are served.",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="where to listen; port 0: a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--min-replicas",
        type=int,
        default=default.min_replicas,
        metavar="N",
        help="minimum number of replicas for a quorum (default: %(default)s)",
    )
    parser.add_argument(
        "--join-timeout-ms",
        type=int,
        default=default.join_timeout_ms,
        metavar="MS",
        help="how long to wait for live replicas that have not joined (default: %(default)s)",
    )
    parser.add_argument(
        "--heartbeat-timeout-ms",
        type=int,
        default=default.heartbeat_timeout_ms,
        metavar="MS",
        help="how long after its last heartbeat a replica counts as dead (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
