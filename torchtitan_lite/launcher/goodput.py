"""What a replica's books say, for people. Layer: imports nothing of the project."""

import json
from pathlib import Path


def in_words(books: Path) -> str | None:
    """The goodput that the file `books.json` of a replica tells; None where it does not."""
    try:
        told = json.loads(books.read_text())
        share, wall_s, lost_s = (float(told[key]) for key in ("goodput", "wall_s", "lost_s"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return f"goodput {share:.1%} of {wall_s:.0f} s, {lost_s:.1f} s of work lost"
