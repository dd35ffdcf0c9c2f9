"""Client that receives a peer's state into this rank's live tensors.

Invariant: nothing is modified before the whole state is known to fit. After a later error the state
is torn and must not be used.
"""

from typing import Any

import torch

from torchtitan_lite.checkpoint import copy_back, local_tensors, tensor_bytes
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import ReplicaError, RpcError
from torchtitan_lite.distributed.rpc.state_client import (
    PeerEndpoint,
    StateConnection,
    fetch_all,
    split_into_chunks,
)
from torchtitan_lite.fault_tolerance.replica.healing.live_state import (
    HealableState,
    parse_header,
    tensor_ranges,
)


def receive_state(endpoint: PeerEndpoint, progress: int, run: HealableState) -> None:
    """Receive the state that a peer has at `progress` into `run`. Raises ReplicaError; TornState
    after the state was modified."""
    first = StateConnection(endpoint, progress)
    try:
        header = first.fetch_header()
        entries, about = parse_header(header)
        _allocate(run, about["shapes"])
        tensors = run.tensors()
        parts = local_tensors(tensors)
        targets = {name: _receive_buffer(part) for name, part in parts.items()}
        try:
            wanted = tensor_ranges(entries, targets)
        except ValueError as error:
            raise IncompatibleState(
                f"The state of another replica does not fit this one: {error} All replicas need "
                "the same config and the same number of ranks."
            ) from None
        chunks = split_into_chunks(
            [(8 + len(header) + start, tensor_bytes(targets[name])) for name, start, _ in wanted]
        )
        try:
            fetch_all(endpoint, progress, chunks)
            for name, target in targets.items():
                if target is not parts[name]:
                    parts[name].copy_(target)
            copy_back(tensors, parts)
            run.load_values(about["values"])
            rng.restore(about["rng"])
        except Exception as error:
            raise TornState(f"{error}") from error
    except RpcError as error:
        raise ReplicaError(str(error)) from error
    finally:
        first.close()


class IncompatibleState(ReplicaError):
    """State that does not fit this replica, now or later."""


class TornState(ReplicaError):
    """Partially received state."""


def _allocate(run: HealableState, shapes: dict[str, Any]) -> None:
    """Allocate the tensors that only exist after the first step. Raises IncompatibleState."""
    try:
        run.allocate({name: tuple(map(int, shape)) for name, shape in shapes.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise IncompatibleState(
            f"The state of another replica does not fit this one: {error!r:.300}"
        ) from None


def _receive_buffer(part: torch.Tensor) -> torch.Tensor:
    """Return memory that can receive `part`: its own on the CPU, a CPU copy for another device."""
    return part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
