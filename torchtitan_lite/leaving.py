"""How a process that was in a process group ends. Layer: imports nothing of the project."""

import logging
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End the process without tearing the interpreter down. All that was opened is closed by now;
    but a background thread of torch that is still running when it is freed aborts the process,
    and what ended well would count as failed (seen on a loaded machine, torch 2.13)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
