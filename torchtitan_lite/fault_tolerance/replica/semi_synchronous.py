"""Semi-synchronous training: replicas that train independently for some steps and are then
averaged, by torchft's LocalSGD (Stich 2018), DiLoCo (Douillard et al. 2023) and streaming DiLoCo
(Douillard et al. 2025).

Between two averages a replica waits for no other. At an average a quorum is formed, lagging
replicas heal, all participants contribute their weights and vote; then they divide the samples of
the steps up to the next average. A replica that joins in between waits for that average.

Progress is the number of committed averages, then the step, so that a replica that missed an
average lags and heals.

torchft decides when to average by counting the steps of an optimizer. Here the step of the run
decides, because a healing replica receives it with the state: torchft's classes get an optimizer
without parameters of the model, which steps when an average is due, and an adapter in place of the
manager, whose quorum has been formed already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchft.local_sgd import DiLoCo, LocalSGD

from torchtitan_lite.checkpoint.background import WriterGroup
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.fault_tolerance.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.fault_tolerance.replica.participation import Share
from torchtitan_lite.fault_tolerance.replica.torchft_manager import QuorumManager
from torchtitan_lite.optim import placed_like

_STEPS_PER_AVERAGE = 10**9
"""Upper bound on the steps of a run."""


class Averaging:
    """Averaging method of a replica, with its state: for DiLoCo, the weights of the last average
    and the outer optimizer's momentum of each parameter."""

    def __init__(self, config: FaultToleranceConfig, model: nn.Module) -> None:
        """`model` holds its initial weights, which all replicas share."""
        streams = config.semi_sync_method == "streaming_diloco"
        num_fragments = config.num_fragments if streams else 1
        self._delay = config.fragment_sync_delay if streams else 0
        self._every = config.sync_steps // num_fragments
        self._adapter = _ManagerAdapter()
        # An optimizer without parameters of the model, whose step only calls torchft's hooks.
        self._trigger = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        self._fragments = fragments_of(model, num_fragments)
        self._repeats = config.semi_sync_method == "local_sgd"
        """Whether a failed average leaves the state unchanged and is retried."""
        self._outer: list[torch.optim.Optimizer] = []
        link: Any = self._adapter
        if self._repeats:
            self._method = LocalSGD(link, model, self._trigger, sync_every=1)
        else:
            self._outer = [
                _outer_optimizer(config, fragment.module) for fragment in self._fragments
            ]
            device = next(model.parameters()).device
            self._method = DiLoCo(
                link,
                [fragment.module for fragment in self._fragments],
                self._trigger,
                self._outer,
                # It starts with the first step of the trigger, and ends with the one after the
                # delay; `is_due` decides when to step.
                sync_every=num_fragments * (self._delay + 1),
                backup_device=device,
                pin_memory=False,
                should_quantize=config.should_quantize,
                fragment_sync_delay=self._delay,
                fragment_update_alpha=config.fragment_update_alpha if streams else 0.0,
            )
        self._method.__enter__()
        self._tried_at = self._tried_at_before = 0
        self.in_progress = False
        """Whether the reduction of a fragment is in progress."""

    def capture_initial_weights(self) -> None:
        """Take the model's current weights as those of the last average."""
        for fragment in self._torchft_fragments():
            fragment.save_parameters()

    def connect(self, manager: QuorumManager) -> None:
        """Use the quorums of `manager`."""
        self._adapter.manager = manager

    def is_due(self, step: int) -> bool:
        """Return whether an average starts after the committed step `step`."""
        begins = step % self._every == -self._delay % self._every
        return begins and step > self._delay and step != self._tried_at and not self.in_progress

    def start(self, step: int, scale: float) -> bool | None:
        """Start to average over the current quorum. Return whether the average was committed, or
        None while it is in progress. This replica's contribution is multiplied by `scale`. Every
        replica of the quorum must call it."""
        self._adapter.scale = scale
        self._tried_at_before, self._tried_at = self._tried_at, step
        return self.advance()

    def advance(self) -> bool | None:
        """Advance an average in progress by one step. Returns as `start` does."""
        self._adapter.committed = None
        self._trigger.step()
        committed = self._adapter.committed
        self.in_progress = committed is None
        if committed:
            self._adapter.count += 1
        elif committed is False and self._repeats:
            self._tried_at = self._tried_at_before
        return committed

    def progress(self, step: int) -> int:
        """Return progress as one number: averages first, then steps."""
        return self._adapter.count * _STEPS_PER_AVERAGE + step

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `NAME.outer_parameter` and `NAME.outer_momentum`; none for LocalSGD."""
        tensors = {}
        for mine, outer, fragment in zip(
            self._fragments, self._outer, self._torchft_fragments(), strict=False
        ):
            for (name, parameter), saved in zip(
                mine.parameters.items(), fragment.original_parameters.values(), strict=True
            ):
                tensors[f"{name}.outer_parameter"] = placed_like(saved, parameter)
                tensors[f"{name}.outer_momentum"] = outer.state[parameter]["momentum_buffer"]
        return tensors

    def _torchft_fragments(self) -> Sequence[Any]:
        """Fragments of DiLoCo. torchft 0.2.0 returns their state only as a pickle or as clones."""
        return self._method._fragments if isinstance(self._method, DiLoCo) else ()

    def values(self) -> dict[str, int]:
        return {"averages": self._adapter.count, "tried_at": self._tried_at}

    def load_values(self, values: Mapping[str, int]) -> None:
        self._adapter.count, self._tried_at = values["averages"], values["tried_at"]


class SemiSynchronousReplicas(FaultTolerantReplicas):
    """This replica among others that are averaged. See `participation.Replicas`."""

    def __init__(self, *arguments: Any, averaging: Averaging, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._averaging = averaging
        averaging.connect(self._manager)
        self._interval_share: Share | None = None
        """This replica's share of each step up to the next average."""
        self._is_averaged = False
        """Whether no step was taken since the last average."""

    def agree(self) -> Share:
        while self._interval_share is None:
            self._join_and_average()
        self._is_averaged = False
        return self._interval_share

    def finish_step(self, *, committed: bool, is_last: bool) -> None:
        averaging = self._averaging
        if committed and averaging.in_progress:
            with self._phases.enter(Phase.COMMUNICATION):
                self._finish_average(averaging.advance())
        while committed and averaging.is_due(self._state.step):
            with self._phases.enter(Phase.QUORUM):
                self._join_and_average()

    def _join_and_average(self) -> None:
        """Form a quorum, and average if due."""
        share = super().agree()
        with self._phases.enter(Phase.COMMUNICATION):
            self._average(share)

    def _average(self, share: Share) -> None:
        """Average if due. `share` is this replica's share of each step up to the next average."""
        manager, state = self._manager, self._state
        # A replica that has just healed has no contribution of its own.
        weight = 0.0 if manager.quorum.heal else 1.0
        device = self._mesh.device.torch_device
        numbers = torch.tensor([weight, 1.0, state.step], dtype=torch.float64, device=device)
        cursor = torch.tensor([state.cursor], dtype=torch.int64, device=device)
        manager.all_reduce_sum(numbers).wait()
        manager.all_reduce_max(cursor).wait()
        weights, present, steps = numbers.tolist()
        count = manager.quorum.replica_world_size
        if manager.errored() is not None:
            manager.abort_step("the reduction over replicas failed")
        elif (present, steps) != (count, count * state.step) or not weights:
            manager.abort_step("a replica was at another step")
        self._abort_if_superseded()
        # Either all ranks know the highest position in the data, or none moves to it.
        is_known = not self._mesh.any(manager.errored() is not None)
        self._wait_until_modifiable()
        index = manager.quorum.replica_rank
        self._interval_share, self._writer_group = (
            share,
            replace(self._alone, index=index, count=count),
        )
        if self._averaging.is_due(state.step):
            outcome = self._averaging.start(state.step, weight * count / max(weights, 1.0))
        else:
            # Vote only to ensure that no peer still reads the state that is about to change.
            outcome = manager.should_commit()
        if is_known and outcome is not False:
            # A replica that skipped a step has consumed more samples than the others.
            state.cursor = int(cursor.item())
        self._finish_average(outcome)

    def _finish_average(self, committed: bool | None) -> None:
        if committed is None:
            return
        if committed:
            self._is_averaged = True
            self._events.append(StepEvent("averaged", {"replicas": self._writer_group.count}))
        else:
            self._interval_share = None
        self._record_outcome("averages", committed=committed)

    @property
    def writer_group(self) -> WriterGroup:
        return replace(self._writer_group, same_state=self._is_averaged)

    def reduce_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        return None

    def should_commit(self, num_ranks: float, cursor_sum: float, step_sum: float) -> bool:
        return True

    @property
    def _progress(self) -> int:
        if not self._has_valid_state:
            return 0
        progress = self._averaging.progress(self._state.step)
        self._floor.raise_to(progress)
        return progress


class Fragment:
    """Part of a model's parameters, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.module = nn.ParameterList(parameters.values())


def fragments_of(model: nn.Module, count: int) -> list[Fragment]:
    """Split the model into `count` fragments of similar size, in its order. Raises ConfigError if
    it has fewer parameters."""
    named = list(model.named_parameters())
    if len(named) < count:
        raise ConfigError(
            f"fault_tolerance.num_fragments ({count}) is above the {len(named)} parameters of the "
            "model. Lower it."
        )
    total, before = sum(parameter.numel() for _, parameter in named), 0
    parts: list[dict[str, nn.Parameter]] = [{}]
    for place, (name, parameter) in enumerate(named):
        is_full = before * count >= total * len(parts)
        must = len(named) - place <= count - len(parts)
        if parts[-1] and len(parts) < count and (is_full or must):
            parts.append({})
        parts[-1][name] = parameter
        before += parameter.numel()
    return [Fragment(part) for part in parts]


class _ManagerAdapter:
    """Adapter that takes the place of torchft's manager during an average."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.manager: QuorumManager | None = None
        self.count = 0
        """Number of committed averages."""
        self.scale = 1.0
        self.committed: bool | None = None

    def start_quorum(self) -> None:
        """Do nothing: the quorum has been formed, and lagging replicas have healed."""

    def current_step(self) -> int:
        return self.count

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        """Average over the quorum, in place. `tensor` is a copy made for this purpose."""
        assert self.manager is not None
        return self.manager.allreduce(tensor.mul_(self.scale), should_quantize=should_quantize)

    def should_commit(self) -> bool:
        assert self.manager is not None
        committed = self.manager.should_commit()
        self.committed = committed
        return committed

    def allow_state_dict_read(self) -> None:
        """Do nothing: the state is served only while nothing modifies it."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing, as in `allow_state_dict_read`."""

    def register_state_dict_fn(self, *arguments: object) -> None:
        """Do nothing: the state is saved and healed through `Averaging.tensors`."""


def _outer_optimizer(config: FaultToleranceConfig, module: nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    made = torch.optim.SGD(
        parameters,
        lr=config.outer_lr,
        momentum=config.outer_momentum,
        nesterov=True,
        # The multi-tensor implementation fails, because experts are on another mesh than other
        # parameters.
        foreach=False,
    )
    for parameter in parameters:
        # The optimizer would create the same zeros in its first step; saving and healing need them
        # earlier.
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.detach())
    return made
