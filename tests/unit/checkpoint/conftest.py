"""A small train state, and managers for it that leave nothing in shared memory."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.manifest import Manifest, read_manifest
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock, free_run, list_runs
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.distributed.mesh import Mesh


class SmallState:
    """Tensors of several shapes and dtypes; the optimizer's tensors exist after the first step."""

    def __init__(self, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.step = 0
        self.cursor = 0
        self.slots: dict[str, torch.Tensor] = {}
        self.model = {
            "model.weight": torch.randn(5, 7, generator=draws),
            "model.wide": torch.randn(3, 2, generator=draws, dtype=torch.float64),
            "model.narrow": torch.randn(9, generator=draws).bfloat16(),
            "model.flags": torch.randint(0, 2, (3,), generator=draws, dtype=torch.bool),
            "model.count": torch.randint(0, 9, (), generator=draws),
        }

    def take_step(self) -> None:
        """Change all values."""
        self.step += 1
        self.cursor += 8
        self.allocate({"optimizer.weight.momentum": (5, 7), "optimizer.weight.step": ()})
        for tensor in self.tensors().values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + self.step)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model | self.slots

    def values(self) -> dict[str, Any]:
        return {
            "train_state": {"step": self.step},
            "lr_scheduler": {"peak_lr": 0.1},
            "dataloader": {"cursor": self.cursor},
        }

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in slots.items():
            if name.startswith("optimizer."):
                self.slots.setdefault(name, torch.zeros(shape))

    def load_values(self, values: Mapping[str, Any]) -> None:
        if "train_state" in values:
            self.step = values["train_state"]["step"]
        if "dataloader" in values:
            self.cursor = values["dataloader"]["cursor"]


Manage = Callable[..., CheckpointManager]


@pytest.fixture
def manage(tmp_path: Path, mesh: Mesh) -> Iterator[Manage]:
    """Return a function (state, settings of [checkpoint]) -> a manager in `tmp_path/checkpoint`
    that saves each step, synchronously unless `async_mode` is set. `dump_folder` may name another
    run."""
    made: list[CheckpointManager] = []
    folders: set[Path] = set()

    def make(
        state: SmallState,
        *,
        dump_folder: Path = tmp_path,
        last_step: int | None = None,
        replica: int | None = None,
        dims: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> CheckpointManager:
        config = CheckpointConfig(
            **({"enable": True, "interval": 1, "async_mode": "disabled"} | settings)
        )
        folders.add(dump_folder)
        manager = CheckpointManager(
            config,
            dump_folder=dump_folder,
            state=state,
            mesh=mesh,
            run_config={"seed": 1, **({"model": {"dims": dict(dims)}} if dims else {})},
            last_step=last_step,
            replica=replica,
        )
        made.append(manager)
        return manager

    yield make
    for manager in made:
        crash(manager)
    for folder in folders:
        free_memory_of(folder)


def crash(manager: CheckpointManager) -> None:
    """Kill the writer of a run and drop its manager, as when both processes are killed at once."""
    saver = manager._asynchronous
    if saver is None:
        return
    saver._copier.close()
    signal.set_wakeup_fd(-1)
    process = saver._writer._process
    if process is not None and process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    saver._writer.detach()
    if saver.buddies is not None:
        copying = saver.buddies.process._process
        saver.buddies.close(free=False)
        if copying is not None:
            copying.wait(30)
    saver._region.close()
    manager._asynchronous = None


def free_memory_of(dump_folder: Path) -> None:
    """Remove what a run left in shared memory, once its writers have exited."""
    for run in list_runs():
        if run.run_id == run_id_in(dump_folder):
            for kind, rank in run.owners:
                RankLock(run.path, rank, kind).wait(100)
            free_run(run.run_id)
    assert run_id_in(dump_folder) not in [run.run_id for run in list_runs()]


def run_id_in(dump_folder: Path) -> str | None:
    """Return the run's id."""
    with suppress(FileNotFoundError):
        return (dump_folder / "run_id").read_text().strip()
    return None


def run_steps(manager: CheckpointManager, state: SmallState, num_steps: int) -> None:
    """Take steps, each followed by the calls of the trainer."""
    for _ in range(num_steps):
        state.take_step()
        manager.after_step()
    manager.wait_for_saves()


def steps_in(root: Path | str) -> list[str]:
    """Return the names in the checkpoint folder."""
    return sorted(path.name for path in Path(root).iterdir())


def manifest_in(folder: Path | str) -> Manifest:
    """Return the manifest of a checkpoint on disk."""
    folder = Path(folder)
    return read_manifest(open_storage(str(folder.parent)), folder.name)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Return whether both have the same names and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )
