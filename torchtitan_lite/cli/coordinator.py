"""`torchtitan-lite coordinator`: decides which machines and replicas of a run train, or prints the
status of a coordinator that does."""

import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.core.optional_dependencies import require
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings

if TYPE_CHECKING:
    from torchtitan_lite.distributed.rpc.server import RpcServer
    from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService

_ENDING = (signal.SIGTERM, signal.SIGINT)
_STATUS_S = 5.0


def run(options: Namespace, arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT, or print the status of another coordinator. Returns the exit
    status."""
    try:
        if options.status is not None:
            print(_status(options.status, as_json=options.json))
        else:
            _serve(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def _serve(options: Namespace) -> None:
    # Blocked in all threads and received by sigwait, so that no signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    configure_logging()
    settings = QuorumSettings(
        options.min_replicas, options.join_timeout_ms, options.heartbeat_timeout_ms
    )
    with _server(options, settings) as server:
        print(f"listening on {server.address}", flush=True)
        signal.sigwait(_ENDING)


def _server(
    options: Namespace, settings: QuorumSettings
) -> "AbstractContextManager[RpcServer | LighthouseService]":
    if options.serve_torchft:
        require("grpc", "--serve-torchft")
        # Otherwise gRPC writes its own log lines.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService
        from torchtitan_lite.fault_tolerance.lighthouse.servicer import first_quorum_id

        logger.warning(
            "--serve-torchft: this lighthouse serves torchft's managers, and accepts "
            "unauthenticated clients at %s.",
            options.bind,
        )
        return LighthouseService(options.bind, settings, first_id=first_quorum_id())
    secret = coordinator_secret()
    from torchtitan_lite.fault_tolerance.supervision.coordinator.server import coordinator_server

    return coordinator_server(options.bind, secret, settings, is_sole=options.sole)


def _status(address: str, *, as_json: bool) -> str:
    secret = coordinator_secret()
    from torchtitan_lite.fault_tolerance.supervision.coordinator.client import coordinator_status
    from torchtitan_lite.fault_tolerance.supervision.coordinator.status import status_text

    status = coordinator_status(address, secret, _STATUS_S)
    return json.dumps(status, indent=2) if as_json else status_text(status, address)


def coordinator_secret() -> str:
    """Return the secret of the run. Raises UserError."""
    secret = os.environ.get(TOKEN, "")
    if problem := secret_problem(secret):
        raise ConfigError(problem)
    return secret
