"""What a run is called, so that its snapshots are told from those of others. Layer: above mesh."""

import hashlib
import json
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.messages import leader_says

_FILE = "run_id"
_TRIES, _POLL_S = 50, 0.1
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class Identity:
    """Of one start of a run."""

    run_id: str
    """32 hexadecimal digits, kept in the run's folder: who deletes that begins another run. Each
    replica has its own, made of that."""
    session: str
    """New with every start, and common to all ranks."""


def identify(dump_folder: Path, mesh: Mesh, replica: int = 0) -> Identity:
    """The leader knows the run or gives it a name; the others are told. Every rank must call it."""
    told = b""
    if mesh.is_leader:
        run_id = run_id_of(_run_id(dump_folder), replica)
        told = json.dumps([run_id, secrets.token_hex(6)]).encode()
    run_id, session = json.loads(leader_says(told))
    return Identity(run_id, session)


def run_id_of(run_id: str, replica: int) -> str:
    """What a replica of a run calls its own snapshots."""
    if replica == 0:
        return run_id
    return hashlib.blake2b(f"{run_id} {replica}".encode(), digest_size=16).hexdigest()


def _run_id(dump_folder: Path) -> str:
    path = dump_folder / _FILE
    known = path.read_text().strip() if path.is_file() else ""
    if _RUN_ID.fullmatch(known):
        return known
    dump_folder.mkdir(parents=True, exist_ok=True)
    if known:
        path.unlink(missing_ok=True)
    # Replicas start together: one of them gives the name, in one write.
    with suppress(FileExistsError), path.open("x") as file:
        file.write(secrets.token_hex(16) + "\n")
    for _ in range(_TRIES):
        known = path.read_text().strip()
        if _RUN_ID.fullmatch(known):
            return known
        time.sleep(_POLL_S)
    raise CheckpointError(f"{path} is no name of a run: delete it, which begins another run.")
