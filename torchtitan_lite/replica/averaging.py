"""Replicas that are averaged every few steps, by torchft's classes: LocalSGD (Stich 2018), DiLoCo
(Douillard et al. 2023) and streaming DiLoCo (Douillard et al. 2025). Layer: above torchft_manager.

torchft counts an optimizer's steps to know when to act. Here the place in the run decides, which a
replica that returns receives with the state: so its classes get an optimizer of nothing that steps
when an average is due, and, in the place of the manager, a link to the one whose quorum was found
already.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchft.local_sgd import DiLoCo, LocalSGD

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.replica.torchft_manager import QuorumManager
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

_ROUND = 10**9
"""More steps than a run has."""


class Averaging:
    """What a replica is averaged by, and what that remembers beside the optimizer: for DiLoCo the
    weights of the last average and the outer optimizer's momentum, of each parameter."""

    def __init__(self, config: FaultToleranceConfig, model: nn.Module) -> None:
        """`model` has its initial weights, which are those of all replicas."""
        streams = config.semi_sync_method == "streaming_diloco"
        num_fragments = config.num_fragments if streams else 1
        self._delay = config.fragment_sync_delay if streams else 0
        self._every = config.sync_steps // num_fragments
        self._link = _Link()
        # Of nothing: its steps only call torchft's hooks.
        self._trigger = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        self._fragments = fragments_of(model, num_fragments)
        self._repeats = config.semi_sync_method == "local_sgd"
        """Whether an average that failed has left everything as it was, to be tried again."""
        self._outer: list[torch.optim.Optimizer] = []
        link: Any = self._link
        if self._repeats:
            self._method = LocalSGD(link, model, self._trigger, sync_every=1)
        else:
            self._outer = [_outer_optimizer(config, one.module) for one in self._fragments]
            device = next(model.parameters()).device
            self._method = DiLoCo(
                link,
                [one.module for one in self._fragments],
                self._trigger,
                self._outer,
                # It begins with the first step of the trigger, and ends with the one after the
                # delay: when that is, is_due says.
                sync_every=num_fragments * (self._delay + 1),
                backup_device=device,
                pin_memory=False,
                should_quantize=config.should_quantize,
                fragment_sync_delay=self._delay,
                fragment_update_alpha=config.fragment_update_alpha if streams else 0.0,
            )
        self._method.__enter__()
        self._tried_at = self._tried_at_before = 0
        self.is_under_way = False
        """Whether a fragment is on its way."""

    def start_here(self) -> None:
        """The weights that the model has now are those that all replicas begin with."""
        for fragment in self._torchft_fragments():
            fragment.save_parameters()

    def connect(self, manager: QuorumManager) -> None:
        """Average by this manager's quorums."""
        self._link.manager = manager

    def is_due(self, step: int) -> bool:
        """Whether an average begins after the committed step `step`."""
        begins = step % self._every == -self._delay % self._every
        return begins and step > self._delay and step != self._tried_at and not self.is_under_way

    def begin(self, step: int, scale: float) -> bool | None:
        """Average with all of the quorum, which was found: whether that was committed, or None
        when it is under way. What this replica gives is multiplied by `scale`. Every replica of the
        quorum must call it."""
        self._link.scale = scale
        self._tried_at_before, self._tried_at = self._tried_at, step
        return self.go_on()

    def go_on(self) -> bool | None:
        """A step later, while one is under way: the same."""
        self._link.committed = None
        self._trigger.step()
        committed = self._link.committed
        self.is_under_way = committed is None
        if committed:
            self._link.count += 1
        elif committed is False and self._repeats:
            self._tried_at = self._tried_at_before
        return committed

    def progress(self, step: int) -> int:
        """How far a replica is, as one number: averages count first."""
        return self._link.count * _ROUND + step

    def tensors(self) -> dict[str, torch.Tensor]:
        """`NAME.outer_parameter` and `NAME.outer_momentum`; none for LocalSGD."""
        found = {}
        for mine, outer, fragment in zip(
            self._fragments, self._outer, self._torchft_fragments(), strict=False
        ):
            for (name, parameter), saved in zip(
                mine.parameters.items(), fragment.original_parameters.values(), strict=True
            ):
                found[f"{name}.outer_parameter"] = _placed(saved, parameter)
                found[f"{name}.outer_momentum"] = outer.state[parameter]["momentum_buffer"]
        return found

    def _torchft_fragments(self) -> Sequence[Any]:
        """torchft 0.2.0 gives what DiLoCo remembers only as a pickle or as clones."""
        return self._method._fragments if isinstance(self._method, DiLoCo) else ()

    def values(self) -> dict[str, int]:
        return {"averages": self._link.count, "tried_at": self._tried_at}

    def load_values(self, values: Mapping[str, int]) -> None:
        self._link.count, self._tried_at = values["averages"], values["tried_at"]


class Fragment:
    """Some parameters of a model, by their names."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.module = nn.ParameterList(parameters.values())


def fragments_of(model: nn.Module, count: int) -> list[Fragment]:
    """`count` parts of about the same size, in the order of the model. Raises ConfigError where
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


class _Link:
    """Takes the place of torchft's manager for the length of an average."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.manager: QuorumManager | None = None
        self.count = 0
        """Averages that were committed."""
        self.scale = 1.0
        self.committed: bool | None = None

    def start_quorum(self) -> None:
        """It was found, and who was behind has received the state."""

    def current_step(self) -> int:
        return self.count

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        """The mean over the quorum, in place, of what is a copy made for it."""
        assert self.manager is not None
        return self.manager.allreduce(tensor.mul_(self.scale), should_quantize=should_quantize)

    def should_commit(self) -> bool:
        assert self.manager is not None
        committed = self.manager.should_commit()
        self.committed = committed
        return committed

    def allow_state_dict_read(self) -> None:
        """The state is only given while nothing changes it."""

    def disallow_state_dict_read(self) -> None:
        """The same."""

    def register_state_dict_fn(self, *given: object) -> None:
        """State is saved and healed with all other, by `Averaging.tensors`."""


def _outer_optimizer(config: FaultToleranceConfig, module: nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    made = torch.optim.SGD(
        parameters,
        lr=config.outer_lr,
        momentum=config.outer_momentum,
        nesterov=True,
        # Experts lie on another mesh than the rest.
        foreach=False,
    )
    for parameter in parameters:
        # As it would begin by itself, but there from the start, to be saved and received.
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.detach())
    return made


def _placed(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
