"""What a run writes of itself, for whoever follows it from outside. Layer: imports nothing of the
project."""

from pathlib import Path

METRICS = "metrics.jsonl"
BOOKS = "books.json"
LAUNCH_LOGS = "launch_logs"
"""Folder of the launcher, below that of the run."""
LAUNCH_EVENTS = "events.jsonl"
"""File of the launcher's events in its folder: one JSON object per line, with `time` (Unix time, in
seconds) and `text`."""
LAUNCHER_STARTED = "launcher started"
"""Text of the first event of each launcher."""
RECEIVES_STATE = "Receiving the state of another replica"
"""A line of the leader begins so when it heals."""
SAMPLE = "A sample of the model:"
"""The line before the text that a finished run prints."""
STARTING = "Starting: "
"""A line of the leader begins so while it starts under the launcher, and names what it does."""
TAKES_PART = "Replicas that take part from sample"
"""And so when it has."""


def replica_folder(dump_folder: Path, replica: int) -> Path:
    """Where one of several replicas writes."""
    return dump_folder / f"replica_{replica:03d}"
