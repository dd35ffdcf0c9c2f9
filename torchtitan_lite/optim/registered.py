"""Optimizers that a user's module registers.

Invariant: a key of [optimizer] that the user sets takes effect, or one line says that it does not.
"""

import weakref
from types import new_class
from typing import Any

import torch

from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.registry import REGISTRY

_USED = {"name", "lr", "weight_decay", "decay_norms_biases_embeddings", "ema_decay"}
"""Keys that the product itself uses, whatever the optimizer."""
_CHECKED = ("muon_", "adamw_", "early_step_in_backward")
"""Starts of keys that other checks reject or log."""


def registered_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the registered optimizer `config.name`, and log the keys that the user has set and
    that it does not read. Nothing is logged about one that keeps the table, because it may read it
    later."""
    keys_read: set[str] = set()
    table = _recording_reads(config, keys_read)
    is_kept = weakref.ref(table)
    optimizer = REGISTRY.optimizers[config.name](groups, table)
    del table
    if is_kept() is None:
        _log_unread(config, keys_read)
    return optimizer


def _log_unread(config: OptimizerConfig, keys_read: set[str]) -> None:
    unread = [
        f"optimizer.{key}"
        for key in type(config).model_fields
        if key in config.model_fields_set - keys_read - _USED and not key.startswith(_CHECKED)
    ]
    if len(unread) == 1:
        logger.info("%s has no effect: the optimizer %s does not read it.", unread[0], config.name)
    elif unread:
        keys = f"{', '.join(unread[:-1])} and {unread[-1]}"
        logger.info("%s have no effect: the optimizer %s does not read them.", keys, config.name)


def _recording_reads(config: OptimizerConfig, keys_read: set[str]) -> OptimizerConfig:
    """Return a table that equals `config`, in an instance of a subclass which adds each key that is
    read to `keys_read`; whatever reads the table as a whole reads all keys."""
    kind = type(config)
    keys = set(kind.model_fields)

    def read(self: OptimizerConfig, name: str) -> Any:
        if name in keys:
            keys_read.add(name)
        elif name == "__dict__":
            # By this, pydantic copies, compares, iterates and dumps a table.
            keys_read.update(keys)
        return kind.__getattribute__(self, name)

    members = {"__getattribute__": read, "__module__": kind.__module__, "__doc__": kind.__doc__}
    recording: Any = new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(members))
    return recording.model_construct(config.model_fields_set, **dict(config))
