"""The names that checkpoints use wherever they lie. Layer: imports nothing of the project."""

import re

ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,127}", re.ASCII)
"""The token of an attempt at a step, where it names files: it cannot name another folder, and is no
file's name."""
_STEP = re.compile(r"step-([0-9]{1,18})", re.ASCII)


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for another folder."""
    match = _STEP.fullmatch(name)
    # "step-007" would be deleted and read under another name than it has.
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def part_name(rank: int) -> str:
    """The file that announces a rank's part."""
    return f"rank-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """The file that announces a rank's failure."""
    return f"rank-{rank:05d}.failed"


def rank_of(name: str, suffix: str) -> int | None:
    """The rank of a part's (".json") or failure's (".failed") name; None for other names."""
    match = re.fullmatch(r"rank-([0-9]{5})" + re.escape(suffix), name, re.ASCII)
    return int(match[1]) if match else None
