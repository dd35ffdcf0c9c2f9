"""What takes turns in a comparison of checkpoints, on one rank: ours, torch DCP in the modes that
torchtitan uses and in its best one, and the floors."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
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

from benchmarks.checkpoint_side import STEPS, Ours, Side
from benchmarks.checkpoint_state import BenchState
from torchtitan_lite.mesh import Mesh


class Dcp(Side):
    """torch.distributed.checkpoint. "thread" is torchtitan's `async`, "process" with shared memory
    that is kept and staging beside training is DCP's best without a GPU."""

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
        given = async_save(
            tensors,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        if isinstance(given, AsyncSaveResponse):
            self._staging, self._upload = given.staging_completion, given.upload_completion
        else:
            self._upload = given

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


class Floor(Side):
    """A plain way for this rank's own part, while training waits."""

    def __init__(self, state: BenchState, mesh: Mesh, folder: Path, *, way: str) -> None:
        super().__init__(state, mesh, folder)
        self._way = way
        self._parts = {
            name: tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            for name, tensor in state.tensors().items()
        }
        self._copies = [torch.zeros_like(part) for part in self._parts.values()]

    def after_step(self, *, saves: bool) -> None:
        if self._way == "memcpy":
            # In each step, as snapshots are taken.
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                self._copies, list(self._parts.values())
            )
            return
        if not saves:
            return
        path = self.folder / f"{self._way}-{self.mesh.rank}"
        if self._way == "safetensors":
            save_file(self._parts, path)
        else:
            with path.open("wb", buffering=0) as file:
                for part in self._parts.values():
                    file.write(part.reshape(-1).view(torch.uint8).numpy().data)
        with path.open("rb") as file:
            os.fsync(file.fileno())


Make = Callable[[BenchState, Mesh, Path], Side]


def _ours(mode: str, every_step: bool, interval: int = STEPS) -> Make:
    return lambda *given: Ours(*given, mode=mode, every_step=every_step, interval=interval)


def _dcp(mode: str) -> Make:
    return lambda *given: Dcp(*given, mode=mode)


def _floor(way: str) -> Make:
    return lambda *given: Floor(*given, way=way)


SIDES: dict[str, dict[str, Make]] = {
    "snapshots": {
        "none": Side,
        "memcpy": _floor("memcpy"),
        "ours, snapshots only": _ours("async", every_step=True, interval=1 << 40),
    },
    "saves": {
        "none": Side,
        "raw": _floor("raw"),
        "safetensors": _floor("safetensors"),
        "ours": _ours("async", every_step=False),
        "ours, snapshot each step": _ours("async", every_step=True),
        "ours, synchronous": _ours("disabled", every_step=False),
        "DCP synchronous": _dcp("sync"),
        "DCP thread": _dcp("thread"),
        "DCP process": _dcp("process"),
    },
}
"""By group: what is compared takes turns in the same processes, and has no others beside it. With
the threads and helpers of all of them, a copy of some milliseconds was measured wrong by half."""
