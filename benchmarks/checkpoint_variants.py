"""Variants of saving a checkpoint on one rank: ours, torch DCP, torchtitan and the floors.

torch DCP runs in the modes that torchtitan uses and in its best mode. torchtitan's own manager is a
variant where it is installed. It needs a separate environment, because of its dependencies:

    python -m venv peers && peers/bin/pip install torch==2.13.0 -r requirements.txt psutil
    peers/bin/pip install --no-deps torchtitan==0.3.0 torch_checkpointing tyro docstring_parser
    peers/bin/python -m benchmarks.checkpoint
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from benchmarks.checkpoint_state import STEPS, BenchState, Ours, Variant
from torchtitan_lite.distributed.mesh import Mesh


class Dcp(Variant):
    """torch.distributed.checkpoint.

    Mode "thread" is torchtitan's `async`; "process" with cached shared memory and asynchronous
    staging is DCP's best mode without a GPU.
    """

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path, *, mode: str) -> None:
        super().__init__(state, mesh, folder)
        self._mode = mode
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._staging: Future[None] | None = None
        self._upload: Future[Any] | None = None
        self._stager = None
        if mode == "process":
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)

    def ready(self) -> torch.Tensor:
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        return super().ready()

    def after_step(self, *, saves: bool) -> None:
        if not saves:
            return
        self.settle()
        path = self.folder / f"dcp-{self.state.step}"
        tensors: dict[str, Any] = dict(self.state.tensors())
        if self._mode == "sync":
            save(tensors, checkpoint_id=path)
            return
        kind = AsyncCheckpointerType.PROCESS if self._stager else AsyncCheckpointerType.THREAD
        response = async_save(
            tensors,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staging, self._upload = response.staging_completion, response.upload_completion
        else:
            self._upload = response

    def settle(self) -> None:
        if self._upload is not None:
            self._upload.result()
            self._upload = None
        if self.mesh.is_leader:
            for old in sorted(self.folder.glob("dcp-*"), key=lambda path: path.stat().st_mtime)[
                :-1
            ]:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.settle()
        if self._stager is not None:
            self._stager.close()


class Floor(Variant):
    """A plain synchronous copy of this rank's shards, to memory or to a file."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path, *, method: str) -> None:
        super().__init__(state, mesh, folder)
        self._method = method
        self._parts = {
            name: tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            for name, tensor in state.tensors().items()
        }
        self._copies = [torch.zeros_like(part) for part in self._parts.values()]

    def after_step(self, *, saves: bool) -> None:
        if self._method == "memcpy":
            # In each step, as our snapshots.
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                self._copies, list(self._parts.values())
            )
            return
        if not saves:
            return
        path = self.folder / f"{self._method}-{self.mesh.rank}"
        if self._method == "safetensors":
            save_file(self._parts, path)
        else:
            with path.open("wb", buffering=0) as file:
                for part in self._parts.values():
                    file.write(part.reshape(-1).view(torch.uint8).numpy().data)
        with path.open("rb") as file:
            os.fsync(file.fileno())


class Torchtitan(Variant):
    """torchtitan's manager, called in each step as its trainer does."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path, *, mode: str) -> None:
        super().__init__(state, mesh, folder)
        # Not a requirement, so its types are unknown as well.
        from torchtitan.components.checkpointer.dcp import (  # pyright: ignore[reportMissingImports]
            CheckpointManager,
        )

        tensors = state.tensors()
        weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        moments = {name: tensor for name, tensor in tensors.items() if name not in weights}
        self.manager: Any = CheckpointManager(
            CheckpointManager.Config(enable=True, async_mode=mode, interval=STEPS, keep_latest_k=2),
            dataloader=None,
            model_parts=[_Model(weights)],
            optimizers=_Stateful(lambda: moments),
            lr_schedulers=_Stateful(lambda: {"last_epoch": state.step}),
            states={"train_state": _Stateful(lambda: {"step": torch.tensor(state.step)})},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def ready(self) -> torch.Tensor:
        self.manager.maybe_wait_for_staging()
        return super().ready()

    def after_step(self, *, saves: bool) -> None:
        # The manager saves at the multiples of its interval.
        self.manager.save(self.state.step)

    def settle(self) -> None:
        self.manager.maybe_wait_for_saving()

    def close(self) -> None:
        self.settle()
        self.manager.close()


class _Stateful:
    """An object with a state dict."""

    def __init__(self, values: Callable[[], Mapping[str, Any]]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values())

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Do nothing: tensors are loaded in place, and other values are not used."""


class _Model(torch.nn.Module):
    """A module with these named weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._weights)


Make = Callable[[BenchState, Mesh, Path], Variant]


def _ours(mode: str, every_step: bool, interval: int = STEPS) -> Make:
    return partial(Ours, mode=mode, every_step=every_step, interval=interval)


TORCHTITAN_ASYNC = "torchtitan async"
GROUPS: dict[str, dict[str, Make]] = {
    "snapshots": {
        "none": Variant,
        "memcpy": partial(Floor, method="memcpy"),
        "ours, snapshots only": _ours("async", every_step=True, interval=1 << 40),
    },
    "saves": {
        "none": Variant,
        "raw": partial(Floor, method="raw"),
        "safetensors": partial(Floor, method="safetensors"),
        "ours": _ours("async", every_step=False),
        "ours, snapshot each step": _ours("async", every_step=True),
        "ours, synchronous": _ours("disabled", every_step=False),
        "DCP synchronous": partial(Dcp, mode="sync"),
        "DCP thread": partial(Dcp, mode="thread"),
        "DCP process": partial(Dcp, mode="process"),
    },
}
"""Variants that alternate in the same processes, without other variants in them: the threads and
child processes of all variants distort a copy of some milliseconds by half."""
if find_spec("torchtitan") is not None:
    # The modes that need no GPU.
    GROUPS["saves"] |= {
        TORCHTITAN_ASYNC: partial(Torchtitan, mode="async"),
        "torchtitan synchronous": partial(Torchtitan, mode="disabled"),
    }
