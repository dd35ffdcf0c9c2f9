"""The run waits for a rank with slow storage, however short the timeout of a collective is."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import WorkerPool
from tests.unit.checkpoint.conftest import SmallState, run_steps
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh

_LIMIT = timedelta(seconds=5)
_SLOW = timedelta(seconds=7)


def save_slowly(folder: Path, slow: str) -> list[str]:
    """Save on two ranks, one of which is slow to write, or whose leader is slow to commit."""
    with (
        pytest.MonkeyPatch.context() as patch,
        start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh,
    ):
        if mesh.rank == (1 if slow == "write" else 0):
            real = getattr(LocalStorage, slow)

            def waits(*args: Any, **kwargs: Any) -> Any:
                time.sleep(_SLOW.total_seconds())
                return real(*args, **kwargs)

            patch.setattr(LocalStorage, slow, waits)
        state = SmallState()
        manager = CheckpointManager(
            CheckpointConfig(enable=True, interval=1, async_mode="disabled"),
            dump_folder=folder,
            state=state,
            mesh=mesh,
            run_config={},
        )
        mesh.set_timeout(_LIMIT.total_seconds())
        run_steps(manager, state, 1)
        manager.close()
        return sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize("slow", ["write", pytest.param("commit", marks=pytest.mark.matrix)])
def test_slow_storage_is_not_a_hang(
    slow: str, pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    assert pools(2).run(save_slowly, tmp_path, slow) == [["step-1"]] * 2
