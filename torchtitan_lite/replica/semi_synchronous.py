"""Replicas that train alone for some steps and are then averaged. Layer: above fault_tolerant and
averaging.

Between two averages a replica waits for nobody. At an average a quorum is found, who is behind
receives the state of another, all give what they have, and vote; those who were there share out the
samples of the steps up to the next one. Who comes meanwhile waits for it.

Progress is the number of averages that were committed, and then the step, so that one that missed
an average is behind, and receives.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers
from torchtitan_lite.phases import Phase
from torchtitan_lite.replica.averaging import Averaging
from torchtitan_lite.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.replica.participation import News, Share


class SemiSynchronousReplicas(FaultTolerantReplicas):
    """This replica among the others. See `participation.Replicas`."""

    def __init__(self, *given: Any, averaging: Averaging, **named: Any) -> None:
        super().__init__(*given, **named)
        self._averaging = averaging
        averaging.connect(self._manager)
        self._round: Share | None = None
        """What this replica takes of each step up to the next average."""
        self._coworkers = ALONE
        self._is_averaged = False
        """Since the last average no step was taken."""

    def agree(self) -> Share:
        while self._round is None:
            self._meet()
        self._is_averaged = False
        return self._round

    def synchronize(self) -> None:
        averaging = self._averaging
        if averaging.is_under_way:
            self._phases.enter(Phase.COMMUNICATION, self._run.step)
            self._end(averaging.go_on())
        while averaging.is_due(self._run.step):
            self._phases.enter(Phase.QUORUM, self._run.step)
            self._meet()

    def _meet(self) -> None:
        """Find who is there, and average where that is due."""
        share = super().agree()
        self._phases.enter(Phase.COMMUNICATION, self._run.step)
        manager, run = self._manager, self._run
        # Who has just received the state of another has nothing of its own to give.
        weight = 0.0 if manager.quorum.heal else 1.0
        device = self._mesh.device.torch_device
        numbers = torch.tensor([weight, 1.0, run.step], dtype=torch.float64, device=device)
        cursor = torch.tensor([run.cursor], dtype=torch.int64, device=device)
        manager.sum_(numbers).wait()
        manager.max_(cursor).wait()
        weights, present, steps = numbers.tolist()
        count = manager.quorum.replica_world_size
        if manager.errored() is not None:
            manager.fail("the numbers of the replicas could not be added up")
        elif (present, steps) != (count, count * run.step) or not weights:
            manager.fail("a replica was at another step")
        # All ranks have found the furthest place, or none of them goes there.
        is_known = not self._mesh.any(manager.errored() is not None)
        self._before_change()
        index = manager.quorum.replica_rank
        self._round, self._coworkers = share, Coworkers(index, count)
        if self._averaging.is_due(run.step):
            outcome = self._averaging.begin(run.step, weight * count / max(weights, 1.0))
        else:
            # Only to know that nobody receives any more what is about to change.
            outcome = manager.should_commit()
        if is_known and outcome is not False:
            # A replica that refused a step has used more samples than the others.
            run.cursor = int(cursor.item())
        self._end(outcome)

    def _end(self, committed: bool | None) -> None:
        if committed is None:
            return
        if committed:
            self._is_averaged = True
            self._news.append(News("averaged", {"replicas": self._coworkers.count}))
        else:
            self._round = None
        self._count("averages", committed=committed)

    @property
    def coworkers(self) -> Coworkers:
        return replace(self._coworkers, alike=self._is_averaged)

    def sum_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        return None

    def settle(self, num_ranks: float, places: float, steps: float) -> bool:
        return True

    def begin(self) -> None:
        return None

    @property
    def _progress(self) -> int:
        if not self._is_whole:
            return 0
        progress = self._averaging.progress(self._run.step)
        self._floor.raise_to(progress)
        return progress
