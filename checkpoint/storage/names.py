"""The names that checkpoints use wherever they lie. Layer: imports nothing of the project."""

import re
from collections.abc import Iterable

ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,127}", re.ASCII)
"""The token of an attempt at a step, where it names files: it cannot name another folder, and is no
file's name."""
_STEP = re.compile(r"step-([0-9]{1,18})", re.ASCII)
_PART = re.compile(r"rank-([0-9]{5})\.json", re.ASCII)
_FAILURE = re.compile(r"rank-([0-9]{5})\.failed", re.ASCII)


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


def parts_in(names: Iterable[str]) -> dict[int, str]:
    """Rank -> name, of those that announce a part."""
    return _by_rank(_PART, names)


def failures_in(names: Iterable[str]) -> dict[int, str]:
    """Rank -> name, of those that announce a failure."""
    return _by_rank(_FAILURE, names)


def _by_rank(pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, str]:
    return {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
