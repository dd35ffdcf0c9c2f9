"""`torchtitan-lite coordinator`: the process that decides which machines of a run train."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence

from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.core.log import configure_logging
from torchtitan_lite.distributed.rpc.authentication import TOKEN, secret_problem

_ENDING = (signal.SIGTERM, signal.SIGINT)


def run(options: Namespace, arguments: Sequence[str]) -> int:
    """Serve machines until SIGTERM or SIGINT. Returns the exit status."""
    # Blocked in all threads and received by sigwait, so that no signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    configure_logging()
    try:
        secret = coordinator_secret()
        from torchtitan_lite.fault_tolerance.supervision.coordinator.server import (
            coordinator_server,
        )

        with coordinator_server(options.bind, secret, is_sole=options.sole) as server:
            print(f"listening on {server.address}", flush=True)
            signal.sigwait(_ENDING)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def coordinator_secret() -> str:
    """Return the secret of the run. Raises UserError."""
    secret = os.environ.get(TOKEN, "")
    if problem := secret_problem(secret):
        raise ConfigError(problem)
    return secret
