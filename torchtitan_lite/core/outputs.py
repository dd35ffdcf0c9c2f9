"""Names of files and log lines that other programs parse."""

from pathlib import Path

METRICS = "metrics.jsonl"
GOODPUT_FILE = "goodput.json"
EARLIER_GOODPUT_FILE = "books.json"
"""What `GOODPUT_FILE` was called; a resumed run renames it."""
LEDGER_GENERATION, LEDGER_PLACED = "generation", "placed"
"""Lines of the sample ledger: start of a generation of the replica, and a received state."""
LEDGER_SAMPLES, LEDGER_OUTCOME = "samples", "outcome"
"""Lines of the sample ledger: an attempt at a step, and its outcome."""
LEDGER_COMMITTED = "commit"
"""Outcome of a committed step: the value of `StepAction.COMMIT`."""
LAUNCH_LOGS = "launch_logs"
"""The launcher's folder, below the run's."""
LAUNCH_EVENTS = "events.jsonl"
"""The launcher's event file: one JSON object per line, with `time` (Unix time, in seconds) and
`text`."""
LAUNCHER_STARTED = "launcher started"
"""First event of each launcher."""
RECEIVES_STATE = "Receiving the state of another replica"
"""Prefix of the leader's log line when it heals."""
SAMPLE = "A sample of the model:"
"""Line before the sample at the end of a run."""
STARTING = "Starting: "
"""Prefix of the leader's log lines during startup under the launcher."""
PARTICIPATES = "Number of participating replicas from sample"
"""Prefix of the leader's log line when it participates in a quorum."""


def sample_ledger(folder: Path, rank: int) -> Path:
    """Return the sample ledger of a rank, in the folder of its replica."""
    return folder / f"samples_rank_{rank}.jsonl"


def replica_folder(dump_folder: Path, replica: int) -> Path:
    """Return the folder of a replica."""
    return dump_folder / f"replica_{replica:03d}"


def quorum_name(replica: int) -> str:
    """Return the name of a replica in quorums and in the history of its run."""
    return f"replica_{replica:05d}"


def output_folder(dump_folder: str, replica: int | None) -> Path:
    """Return the folder of a run's outputs; those of a replica are its own, except for checkpoints.
    `replica` is None without fault tolerance."""
    return Path(dump_folder) if replica is None else replica_folder(Path(dump_folder), replica)


def find_output_folder(path: Path) -> Path:
    """Return the output folder of the run that `path` names: that folder, the folder of its
    checkpoints, or of a step. Another folder is returned as it is."""
    whole = path.absolute()
    above = [whole.parent] if any(whole.glob("step-*")) else []
    if whole.name.startswith("step-"):
        above = [whole.parent.parent]
    for folder in (path, *above):
        names = (folder / METRICS, *folder.glob(f"replica_*/{METRICS}"))
        if any(name.is_file() for name in names):
            return folder
    return path
