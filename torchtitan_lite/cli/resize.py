"""`torchtitan-lite resize`."""

import argparse
import sys
import time
from collections.abc import Sequence

from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ACCEPT_S,
    ResizeRequest,
    ResizeState,
    RunMesh,
    read_answer,
    send_request,
    withdraw_request,
)

_POLL_S = 0.05


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Request a resize, and wait until the run trains on the new mesh. Returns the exit status: 1
    if the run did not follow."""
    request = ResizeRequest(mesh=RunMesh(options.nproc, tuple(arguments)))
    try:
        send_request(options.run, request)
    except OSError as error:
        print(f"resize: {options.run} is not the output folder of a run: {error}", file=sys.stderr)
        return 2
    began_s, is_accepted = time.monotonic(), False
    while True:
        answer = read_answer(options.run, request)
        waited_s = time.monotonic() - began_s
        if answer is not None:
            is_accepted = True
            if answer.state is ResizeState.DONE:
                print(f"The run trains on {request.mesh} after {waited_s:.1f} s.")
                return 0
            if answer.state in (ResizeState.REJECTED, ResizeState.FAILED):
                print(f"resize: {answer.state}: {answer.reason}", file=sys.stderr)
                return 1
        if waited_s > (options.timeout if is_accepted else ACCEPT_S):
            withdraw_request(options.run)
            print(f"resize: {_silence(waited_s, is_accepted=is_accepted)}", file=sys.stderr)
            return 1
        time.sleep(_POLL_S)


def _silence(waited_s: float, *, is_accepted: bool) -> str:
    if is_accepted:
        return f"accepted, but there was no step on the new mesh within {waited_s:.0f} s."
    return (
        f"no agent answered within {waited_s:.0f} s. Only `torchtitan-lite train --spares K`, "
        "`torchtitan-lite train --rdzv-endpoint` and `torchtitan-lite launch` follow requests, "
        "while all ranks train."
    )
