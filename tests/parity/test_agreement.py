"""Decisions that all ranks make alike, although they see different things."""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.harness.jobs import mesh_for, odd_config
from tests.harness.ranks import WorkerPool
from tests.unit.checkpoint.conftest import SmallState
from torchtitan_lite.checkpoint import sync_saver
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.core.errors import CheckpointError

Pools = Callable[[int], WorkerPool]


def number_of_the_leader(folder: Path) -> int:
    mesh = mesh_for(odd_config(folder, {}))
    return mesh.broadcast_int((1 << 53) + 1 + mesh.rank)


def test_all_ranks_have_the_number_of_the_leader(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(number_of_the_leader, tmp_path / "run" / "run") == [(1 << 53) + 1] * 2


def permitted_snapshots(folder: Path) -> Mapping[int, int | None] | None:
    mesh = mesh_for(odd_config(folder, {}))
    return SnapshotLineage(folder / f"of-rank-{mesh.rank}.json", mesh).permitted()


def test_all_ranks_restore_snapshots_of_the_same_history(pools: Pools, tmp_path: Path) -> None:
    """Also if only rank 0 sees the file."""
    folder = tmp_path / "run" / "run"
    folder.mkdir(parents=True)
    (folder / "of-rank-0.json").write_text("[[3, 40], [5, null]]")
    assert pools(2).run(permitted_snapshots, folder) == [{3: 40, 5: None}] * 2


def error_of_a_save(folder: Path) -> str:
    """The error of a save that rank 1 cannot write."""
    mesh = mesh_for(odd_config(folder, {}))
    state, config = SmallState(), CheckpointConfig(enable=True, async_mode="disabled")
    manager = CheckpointManager(
        config, dump_folder=folder, state=state, mesh=mesh, run_config={"seed": 1}
    )
    announce = LocalStorage.announce

    def put(*given: object) -> None:
        if mesh.rank == 1:
            raise OSError(errno.EIO, "the disk of rank 1 fails")
        announce(*given)  # pyright: ignore[reportArgumentType]

    # Rank 0 must not wait for the missing part at all.
    with (
        patch.object(sync_saver, "_PATIENCE_S", 1.0),
        patch.object(LocalStorage, "announce", put),
        pytest.raises(CheckpointError) as error,
    ):
        manager.final_save(finished=False)
    manager.close()
    return str(error.value)


def test_a_save_that_a_rank_cannot_write_fails_on_all(pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "run"
    folder.mkdir(parents=True)
    first, second = pools(2).run(error_of_a_save, folder)
    assert "another rank could not write" in first
    assert "the disk of rank 1 fails" in second
