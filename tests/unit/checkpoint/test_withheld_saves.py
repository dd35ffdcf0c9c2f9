"""Saves of a generation that must not write yet, see `core.output_fence`."""

import time
from pathlib import Path

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState
from torchtitan_lite.core.output_fence import OUTPUTS_AFTER, lease_clock_s

_WITHHELD_S = 5.0


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_save_waits_and_snapshots_do_not(
    async_mode: str, manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OUTPUTS_AFTER, str(lease_clock_s() + _WITHHELD_S))
    state = SmallState()
    manager = manage(state, interval=2, async_mode=async_mode, enable_first_step_checkpoint=False)
    manager.restore()
    allowed_s = time.monotonic() + _WITHHELD_S
    for _ in range(2):
        assert time.monotonic() < allowed_s
        state.take_step()
        manager.after_step()
    # The writer is another process, so that training continues.
    assert (time.monotonic() < allowed_s) is (async_mode == "async")
    if async_mode == "async":
        assert not list(Path(manager.root).glob("step-*"))
    manager.wait_for_saves()
    assert time.monotonic() > allowed_s - 0.1
    manager.final_save(finished=False)
    assert [path.name for path in Path(manager.root).glob("step-*")] == ["step-2"]
