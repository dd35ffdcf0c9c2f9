"""Ids of a run and of one start of it."""

import hashlib
import json
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh

_FILE = "run_id"
_TRIES, _POLL_S = 50, 0.1
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, and of one generation (start of all ranks) of it."""

    run_id: str
    """32 hexadecimal digits, stored in the run's folder; deleting that file begins a new run. Each
    replica derives its own."""
    generation_id: str
    """12 hexadecimal digits, unique to every generation and equal on all its ranks."""


def agree_on_identity(dump_folder: Path, mesh: Mesh, replica: int | None = None) -> RunIdentity:
    """Return the run's identity, which the leader reads or creates and broadcasts. Every rank must
    call it."""
    payload = b""
    if mesh.is_leader:
        payload = json.dumps([run_id_in(dump_folder, replica), secrets.token_hex(6)]).encode()
    run_id, generation_id = json.loads(broadcast_bytes(payload))
    return RunIdentity(run_id, generation_id)


def run_id_in(dump_folder: Path, replica: int | None) -> str:
    """Return the id of a replica of the run in `dump_folder`, or of the run itself without
    replicas. Raises as `shared_run_id` does."""
    return replica_run_id(shared_run_id(dump_folder), replica or 0)


def replica_run_id(run_id: str, replica: int) -> str:
    """Return the run id under which a replica keeps its snapshots."""
    if replica == 0:
        return run_id
    return hashlib.blake2b(f"{run_id} {replica}".encode(), digest_size=16).hexdigest()


def shared_run_id(dump_folder: Path) -> str:
    """Return the id of the run in `dump_folder`, which all its replicas share; create it if there
    is none. Raises CheckpointError."""
    path = dump_folder / _FILE
    known = path.read_text().strip() if path.is_file() else ""
    if _RUN_ID.fullmatch(known):
        return known
    dump_folder.mkdir(parents=True, exist_ok=True)
    if known:
        path.unlink(missing_ok=True)
    # Replicas start concurrently: one of them creates the name, in a single write.
    with suppress(FileExistsError), path.open("x") as file:
        file.write(secrets.token_hex(16) + "\n")
    for _ in range(_TRIES):
        known = path.read_text().strip()
        if _RUN_ID.fullmatch(known):
            return known
        time.sleep(_POLL_S)
    raise CheckpointError(f"{path} is not a run id: delete it to begin a new run.")
