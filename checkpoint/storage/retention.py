"""Which checkpoints stay. Layer: imports nothing of the project."""

from collections.abc import Iterable


def to_delete(
    steps: Iterable[int], saved: int, *, keep_latest_k: int, keep_every: int = 0
) -> list[int]:
    """The steps to delete after `saved` was committed, oldest first.

    Of the steps up to `saved` the newest `keep_latest_k` stay (0: all). Steps that `keep_every`
    divides are milestones: they stay, and are not counted. Later steps are damaged or of a run
    that was taken back: they neither go nor push out what was just written. `saved` itself always
    stays.
    """
    if keep_latest_k == 0:
        return []
    counted = sorted(
        step for step in set(steps) if step <= saved and not (keep_every and step % keep_every == 0)
    )
    return [step for step in counted[:-keep_latest_k] if step != saved]
