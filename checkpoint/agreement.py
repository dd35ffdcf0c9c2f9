"""What one rank has met is known to all, so that none waits for another in the next collective.

Layer: above damage.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar, cast

from torchtitan_lite.checkpoint.damage import is_damage
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.log import logger
from torchtitan_lite.messages import gather_texts

_T = TypeVar("_T")


def agree(error: BaseException | None) -> None:
    """Raise on all ranks what one has met: DamagedCheckpoint for damage, CheckpointError for
    anything else. Every rank must call it."""
    told = ""
    if error is not None:
        if isinstance(error, (UserError, OSError)):
            text = str(error)
        else:
            text = f"unexpected {error!r}"
            logger.error("%s", "".join(traceback.format_exception(error)))
        told = f"{'damage' if is_damage(error) else 'misfit'} {text}"
    said = [text.decode().partition(" ") for text in gather_texts(told.encode()) if text]
    if not said:
        return
    # What is no damage goes first: it would stay if another checkpoint was taken.
    others = {message for kind, _, message in said if kind != "damage"}
    kind = CheckpointError if others else DamagedCheckpoint
    raise kind(" ".join(sorted(others or {message for _, _, message in said})))


def together(action: Callable[[], _T]) -> _T:
    """What `action`, in which there is no collective, gives to this rank. Raises on all ranks what
    one of them meets, as `agree` does. Every rank must call it."""
    result, error = None, None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = caught
    agree(error)
    return cast(_T, result)


def first_said(text: str) -> str:
    """What the first rank says that has something to say; "" where none has. Every rank must call
    it."""
    return next((said.decode() for said in gather_texts(text.encode()) if said), "")
