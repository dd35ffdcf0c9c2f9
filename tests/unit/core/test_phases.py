"""Phases of a step, as listeners see them."""

import pytest

from torchtitan_lite.core.phases import Phase, Phases


class _Listener:
    def __init__(self) -> None:
        self.entered_phases: list[tuple[Phase, int]] = []

    def entered(self, phase: Phase, step: int) -> None:
        self.entered_phases.append((phase, step))


def test_a_block_returns_to_the_previous_phase() -> None:
    listener, step = _Listener(), 0
    phases = Phases([listener])
    phases.follow(lambda: step)
    phases.enter(Phase.BETWEEN)
    with phases.enter(Phase.COMPUTE):
        with phases.enter(Phase.QUORUM):
            step = 7
        with phases.enter(Phase.DATA):
            pass
    phases.enter(Phase.END)
    assert listener.entered_phases == [
        (Phase.START, 0),
        (Phase.BETWEEN, 0),
        (Phase.COMPUTE, 0),
        (Phase.QUORUM, 0),
        (Phase.COMPUTE, 7),
        (Phase.DATA, 7),
        (Phase.COMPUTE, 7),
        (Phase.BETWEEN, 7),
        (Phase.END, 7),
    ]


def test_the_phase_of_a_failure_stays() -> None:
    listener = _Listener()
    phases = Phases([listener])
    with (
        pytest.raises(RuntimeError),
        phases.enter(Phase.COMPUTE),
        phases.enter(Phase.COMMUNICATION),
    ):
        raise RuntimeError
    assert listener.entered_phases[-1] == (Phase.COMMUNICATION, 0)
