"""Hooks act on committed steps: one that is retried has no results."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.training import hooks
from torchtitan_lite.training.metrics import Event


@pytest.mark.parametrize("committed", [True, False])
def test_a_step_that_is_retried_is_neither_validated_nor_accounted_for(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    events: list[Event] = []
    metrics: Any = SimpleNamespace(event=events.append)
    tracker: Any = SimpleNamespace(totals=lambda: SimpleNamespace(values=dict))
    unused: Any = None
    monkeypatch.setattr(hooks, "validate", lambda *_: SimpleNamespace(mean=2.0))
    state: Any = SimpleNamespace(step=4, model=None)
    report: Any = SimpleNamespace(committed=committed, number=4)
    hooks.goodput_hook(2, tracker, metrics)(state, report)
    hooks.validation_hook(2, 8, unused, unused, metrics, unused)(state, report)
    assert [event.name for event in events] == (
        ["time_accounting", "validation"] if committed else []
    )
