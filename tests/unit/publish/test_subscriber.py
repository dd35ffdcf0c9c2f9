"""Processes of a subscriber that fail, or hold different versions."""

import pytest

from torchtitan_lite.errors import PublishError
from torchtitan_lite.publish.subscriber import _FAILED, _together


def test_a_failure_reaches_the_other_processes() -> None:
    told: list[int] = []

    def agree(own: int) -> int:
        told.append(own)
        return own

    def fail() -> int:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        _together(agree, fail)
    assert told == [_FAILED]
    assert _together(agree, lambda: 7) == 7
    with pytest.raises(PublishError, match="Another process of the subscriber failed"):
        _together(lambda own: _FAILED, lambda: 7)
