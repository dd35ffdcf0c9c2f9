"""Decisions that all ranks make alike, although they see different things."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.harness.jobs import mesh_for, odd_config
from tests.harness.ranks import WorkerPool
from torchtitan_lite.checkpoint.lineage import SnapshotLineage

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
