"""What a user's own package adds to a run: model families, data sets, losses, optimizers, hooks,
metrics sinks and storages.

`experimental.custom_import` names a module; it is imported before the configuration is checked, and
its top level calls the `register_*` functions here. `job.custom_config_module` names a module whose
class `JobConfig` adds tables and keys to the configuration (`config/custom_tables.py`).

Only names that the user writes into a file or a command line are imported, never names that a
checkpoint records.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan_lite.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set that a user has registered."""

    documents: Callable[[], Iterable[Any]]
    """Makes an iterator over all documents, in the same order each time: texts, or, for
    `messages_column`, lists of messages."""
    version: str
    """Changes when the documents do, so that they are tokenized again."""


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Everything that was registered in this process, by name or in order."""

    models: dict[str, str] = field(default_factory=dict)
    """Family -> module."""
    datasets: dict[str, Dataset] = field(default_factory=dict)
    online_datasets: dict[str, Callable[[str | None], Any]] = field(default_factory=dict)
    losses: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    optimizers: dict[str, Callable[[list[dict[str, Any]], Any], Any]] = field(default_factory=dict)
    storages: dict[str, type] = field(default_factory=dict)
    """Scheme of a URL -> filesystem of fsspec."""
    hooks: list[Callable[[Any], Any]] = field(default_factory=list)
    sinks: list[Callable[[Any], Any]] = field(default_factory=list)


REGISTRY = Registry()
"""Filled while a user's module is imported; read-only after that."""


def register_model(name: str, module: str) -> None:
    """Add the model family `name`, which the module of that dotted name defines as a file in
    `models/` does: `FLAVORS` and `model_spec(config)`. `model.name` selects it.

    Raises ConfigError if another module has that name.
    """
    if REGISTRY.models.get(name, module) != module:
        raise ConfigError(
            f'The model family "{name}" is registered twice: by {REGISTRY.models[name]} and by '
            f"{module}."
        )
    REGISTRY.models[name] = module


def register_dataset(
    name: str, documents: Callable[[], Iterable[Any]], *, version: str = "1"
) -> None:
    """Add the data set `name`, which `training.dataset` selects. See `Dataset`.

    Raises ConfigError if another function has that name.
    """
    dataset = Dataset(documents=documents, version=version)
    if REGISTRY.datasets.get(name, dataset) != dataset or name in REGISTRY.online_datasets:
        raise ConfigError(f'The data set "{name}" is registered twice.')
    REGISTRY.datasets[name] = dataset


def register_online_dataset(name: str, open: Callable[[str | None], Any]) -> None:
    """Add the online data set `name`, which `training.dataset` selects: its samples are made while
    the run trains. `open(dataset_path)` returns a `data.online.OnlineDataset`.

    Raises ConfigError if another function has that name.
    """
    if REGISTRY.online_datasets.get(name, open) != open or name in REGISTRY.datasets:
        raise ConfigError(f'The data set "{name}" is registered twice.')
    REGISTRY.online_datasets[name] = open


def register_loss(name: str, make: Callable[[Any], Any]) -> None:
    """Add the loss `name`, which `training.loss` selects: `make(config)` returns a
    `spec.MicrobatchLoss`.

    Raises ConfigError if another function has that name.
    """
    if REGISTRY.losses.get(name, make) != make:
        raise ConfigError(f'The loss "{name}" is registered twice.')
    REGISTRY.losses[name] = make


def register_optimizer(name: str, make: Callable[[list[dict[str, Any]], Any], Any]) -> None:
    """Add the optimizer `name`, which `optimizer.name` selects: `make(groups, config)`, given the
    table [optimizer], returns a `torch.optim.Optimizer`. The groups have this rank's shards of the
    parameters as plain tensors, so the update of an element may depend on that element alone.

    The rate of each step is in `group["lr"]`. The state of a parameter consists of tensors of its
    shape and data type, and of `step`, a tensor without dimensions.

    Raises ConfigError if another function has that name.
    """
    if REGISTRY.optimizers.get(name, make) != make:
        raise ConfigError(f'The optimizer "{name}" is registered twice.')
    REGISTRY.optimizers[name] = make


def register_storage(scheme: str, filesystem: type) -> None:
    """Add the scheme of a URL: `checkpoint.folder = "SCHEME://..."` is stored by `filesystem`, a
    subclass of `fsspec.AbstractFileSystem`, as every other location of that scheme.

    Raises ConfigError if another class has that scheme, or if the class's `protocol` lacks it: it
    would take the URL for a path.
    """
    given = getattr(filesystem, "protocol", ())
    protocols = (given,) if isinstance(given, str) else tuple(given)
    if scheme not in protocols:
        raise ConfigError(
            f'{filesystem.__name__} is registered for "{scheme}://", but its protocol is '
            f"{protocols}: add the scheme there."
        )
    if REGISTRY.storages.get(scheme, filesystem) != filesystem:
        raise ConfigError(f'The storage "{scheme}://" is registered twice.')
    # Only registering a storage needs the package.
    import fsspec

    REGISTRY.storages[scheme] = filesystem
    fsspec.register_implementation(scheme, filesystem, clobber=True)


def register_hook(make: Callable[[Any], Any]) -> None:
    """Add a hook: `make(context)`, given a `hooks.HookContext`, returns a function that is called
    as `hook(state, report)` after each step, on every rank. A hook reads the state and never
    changes it."""
    if make not in REGISTRY.hooks:
        REGISTRY.hooks.append(make)


def register_metrics_sink(make: Callable[[Any], Any]) -> None:
    """Add a metrics sink: `make(context)`, given a `metrics.SinkContext`, returns a
    `metrics.sink.Sink`, which receives each step and event on the leader."""
    if make not in REGISTRY.sinks:
        REGISTRY.sinks.append(make)


def unknown_name(key: str, unknown: str, known: Sequence[str]) -> str:
    """Describe that the value of a key is not one of `known`, with the most similar one."""
    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(unknown.lower(), by_lower, n=1)
    hint = f' Did you mean "{by_lower[nearest[0]]}"?' if nearest else ""
    return f'{key} = "{unknown}" is not one of {", ".join(known)}.{hint}'


def import_module(name: str, key: str) -> ModuleType:
    """Import the module that `key` names; packages in the working directory are found too.

    Raises ConfigError if there is no such module. An error inside of it is the user's to see, with
    its traceback.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f'{key} = "{name}" is not the dotted name of a module.')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise ConfigError(
            f'{key} = "{name}": there is no module {error.name}. Install its package, set '
            f"PYTHONPATH, or start the run in the folder that contains it (now {here})."
        ) from None
