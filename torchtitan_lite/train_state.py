"""TrainState: the definition of what a restart needs. What is not in it is lost.

Layer: above anomalies, data, optim and checkpoint (whose `State` it is).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from torchtitan_lite.anomalies import History
from torchtitan_lite.data import DataLoader
from torchtitan_lite.optim import ShardedOptimizer, WarmupStableDecay


class OuterState(Protocol):
    """What averages replicas every few steps, and remembers more than the optimizer does."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the name of a parameter and that of a slot, each of the parameter's shape."""
        ...

    def values(self) -> dict[str, int]:
        """Numbers beside them."""
        ...

    def load_values(self, values: Mapping[str, int]) -> None:
        """Take back what `values` gave."""
        ...


@dataclass(kw_only=True)
class TrainState:
    """A run between two steps. The ambient generators belong to it too; the checkpoint manager
    saves them of every rank."""

    model: nn.Module
    optimizer: ShardedOptimizer
    schedule: WarmupStableDecay
    loader: DataLoader
    step: int = 0
    """Committed steps. A step that was refused does not count."""
    tokens: int = 0
    """Tokens of all committed steps."""
    cursor: int = 0
    """Place in the global order of samples at which the next step begins; a refused step moves it
    on too."""
    history: History = field(default_factory=History)
    """What the judgement of the next step depends on."""
    outer: OuterState | None = None
    """Only of replicas that average every few steps."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """`model.NAME`, and `optimizer.NAME.SLOT` once the optimizer has its state."""
        found = model_tensors(self.model)
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.slots(parameter).items():
                found[f"optimizer.{name}.{slot}"] = value
        if self.outer is not None:
            found |= {f"optimizer.{name}": value for name, value in self.outer.tensors().items()}
        return found

    def values(self) -> dict[str, Any]:
        """Everything that is not a tensor, by the parts that `exclude_from_loading` names."""
        outer = {} if self.outer is None else {"outer": self.outer.values()}
        return {
            "train_state": {
                "step": self.step,
                "tokens": self.tokens,
                "history": self.history.values(),
                **outer,
            },
            "lr_scheduler": asdict(self.schedule),
            "dataloader": {"cursor": self.cursor, "sources": self.loader.state(self.cursor)},
        }

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Make the optimizer's state, which torch makes in its first step, for the saved names."""
        places = dict(self.model.named_parameters())
        there = {} if self.outer is None else self.outer.tensors()
        for full_name, shape in slots.items():
            part, _, rest = full_name.partition(".")
            name, _, slot = rest.rpartition(".")
            if part == "optimizer" and name in places and rest not in there:
                self.optimizer.allocate(places[name], slot, shape)

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what `values` gave. The learning rate's schedule is that of the config, which
        may have changed on purpose (more steps); the saved one is kept for the record only."""
        if "train_state" in values:
            self.step = values["train_state"]["step"]
            self.tokens = values["train_state"]["tokens"]
            self.history = History.of(values["train_state"].get("history", {}))
            if self.outer is not None and "outer" in values["train_state"]:
                self.outer.load_values(values["train_state"]["outer"])
        if "dataloader" in values:
            self.cursor = values["dataloader"]["cursor"]
            self.loader.load_state(values["dataloader"]["sources"])


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model as `model.NAME`, a tied one once."""
    found = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return found | {f"model.{name}": buffer for name, buffer in buffers.items()}
