"""TrainState: everything that a resumed run needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from torchtitan_lite.checkpoint import FrozenBase, model_tensors
from torchtitan_lite.data import DataLoader
from torchtitan_lite.optim import ShardedOptimizer, WarmupStableDecay
from torchtitan_lite.training.anomalies import StepStatistics


class OuterState(Protocol):
    """State of an outer optimizer, which averages replicas every few steps."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return tensors of the shapes of parameters, as `PARAMETER.SLOT`."""
        ...

    def values(self) -> dict[str, int]:
        """Return the integers beside the tensors."""
        ...

    def load_values(self, values: Mapping[str, int]) -> None:
        """Restore from `values`."""
        ...


@dataclass(kw_only=True)
class TrainState:
    """The state of a run between two steps. Random generators are part of it, too; the checkpoint
    manager saves those of every rank."""

    model: nn.Module
    optimizer: ShardedOptimizer
    lr_scheduler: WarmupStableDecay
    loader: DataLoader
    step: int = 0
    """Committed steps. A skipped step does not count."""
    tokens: int = 0
    """Tokens of all committed steps."""
    cursor: int = 0
    """Position in the global order of samples at which the next step begins; a skipped step
    advances it, too."""
    statistics: StepStatistics = field(default_factory=StepStatistics)
    """Statistics on which the decision about the next step depends."""
    outer: OuterState | None = None
    """State of the outer optimizer; None unless replicas are semi-synchronous."""
    base: FrozenBase | None = None
    """The frozen weights, if only adapters are trained. They are no part of the state."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors: `model.NAME`, and once the optimizer has state,
        `optimizer.NAME.SLOT`."""
        tensors = trained_tensors(self.model) | self._slots()
        if self.outer is not None:
            tensors |= {f"optimizer.{name}": value for name, value in self.outer.tensors().items()}
        return tensors

    def optimized_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors that nothing but the optimizer, healing and the average of
        replicas writes: trained parameters and their slots, named as in `tensors`. A model may
        write its buffers in any forward."""
        parameters = _trained(self.model).items()
        return {f"model.{name}": parameter.detach() for name, parameter in parameters} | (
            self._slots()
        )

    def _slots(self) -> dict[str, torch.Tensor]:
        return {
            f"optimizer.{name}.{slot}": value
            for name, parameter in _trained(self.model).items()
            for slot, value in self.optimizer.slots(parameter).items()
        }

    def values(self) -> dict[str, Any]:
        """Return everything that is not a tensor, by the part that `exclude_from_loading` names."""
        outer = {} if self.outer is None else {"outer": self.outer.values()}
        base = {} if self.base is None else {"base": self.base.to_json()}
        return {
            "train_state": {
                "step": self.step,
                "tokens": self.tokens,
                "history": self.statistics.values(),
                **outer,
                **base,
            },
            "lr_scheduler": asdict(self.lr_scheduler),
            "dataloader": {"cursor": self.cursor, "sources": self.loader.state(self.cursor)},
        }

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Create the optimizer's state, which torch creates in its first step. `slots` are the
        shapes of saved tensors, by name."""
        parameters = _trained(self.model)
        outer = {} if self.outer is None else self.outer.tensors()
        for full_name, shape in slots.items():
            part, _, rest = full_name.partition(".")
            name, _, slot = rest.rpartition(".")
            if part == "optimizer" and name in parameters and rest not in outer:
                self.optimizer.allocate(parameters[name], slot, shape)

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore from `values`. The learning rate scheduler is that of the config, which may have
        changed on purpose (more steps); the saved one is for information only. Raises
        CheckpointError for the state of adapters of other weights."""
        if "train_state" in values:
            if self.base is not None:
                self.base.check(values["train_state"].get("base"))
            self.step = values["train_state"]["step"]
            self.tokens = values["train_state"]["tokens"]
            self.statistics = StepStatistics.of(values["train_state"].get("history", {}))
            if self.outer is not None and "outer" in values["train_state"]:
                self.outer.load_values(values["train_state"]["outer"])
        if "dataloader" in values:
            self.cursor = values["dataloader"]["cursor"]
            self.loader.load_state(values["dataloader"]["sources"])


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what training changes of the tensors of a model: all of them, or if some parameters
    are frozen, the other parameters."""
    trained = {f"model.{name}" for name in _trained(model)}
    tensors = model_tensors(model)
    if len(trained) == len(list(model.parameters())):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name in trained}


def frozen_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the other tensors of a model."""
    trained = trained_tensors(model)
    return {name: t for name, t in model_tensors(model).items() if name not in trained}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
