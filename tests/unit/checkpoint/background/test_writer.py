"""Real writer processes: saves, failures, and what is left of them."""

from pathlib import Path

import pytest

from tests.snapshots import trainers, verify


@pytest.mark.parametrize("world_size", [1, 2])
def test_saves_are_whole_and_old_ones_go(tmp_path: Path, world_size: int) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, world_size) as run:
        run.start(keep_latest_k=2)
        for step in (1, 2, 3):
            run.snapshot(step % 3, step)
            run.save(step % 3, step)
            said = run.writers[0].wait_for("committed", 20)
            assert said == [{"written": step}, {"committed": step}]
    assert sorted(path.name for path in root.iterdir()) == ["step-2", "step-3"]
    manifest = verify(root / "step-3")
    assert manifest["tensors"]["model.none"]["boxes"] == []
    assert manifest["layouts"] == [{"cut": world_size}]


def test_a_killed_trainer_loses_nothing_that_is_complete(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        run.snapshot(1, 8)
        run.regions[0].begin(2, 9)
        run.die()
        for writer in run.writers:
            assert writer._process is not None
            assert writer._process.wait(10) == 0
    verify(root / "step-8")
    assert [path.name for path in root.iterdir()] == ["step-8"]
