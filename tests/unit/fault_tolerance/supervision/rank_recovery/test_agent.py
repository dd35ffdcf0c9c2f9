"""The main loop of an agent runs while it waits for the end of processes."""

import time
from pathlib import Path

from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_agent import RankAgent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import RestartPolicy


class _Agent(RankAgent):
    """Counts the iterations of its main loop."""

    num_pauses = 0

    def _pause(self) -> None:
        self.num_pauses += 1
        super()._pause()


def test_the_agent_never_waits_for_a_process_that_does_not_read(
    stopped: list[RankProcess], tmp_path: Path
) -> None:
    agent = _Agent(
        lambda: stopped[0],
        RunMesh(1),
        0,
        policy=RestartPolicy(1),
        requests=[],
        inbox=RequestInbox(tmp_path),
        check_resize=lambda request: None,
    )
    began_s = time.monotonic()
    for process in stopped:
        process.state = RankState.TRAINING
        # More than the buffer of the socket holds.
        for number in range(20_000):
            process.renew_lease(float(number))
        process.abort_training()
    agent._end(stopped, time.monotonic() + 0.5)  # pyright: ignore[reportPrivateUsage]
    assert [one.state for one in stopped] == [RankState.EXITED] * 2
    assert [str(one.status) for one in stopped] == ["killed by SIGKILL"] * 2
    assert agent.num_pauses > 5 and time.monotonic() - began_s < 5
