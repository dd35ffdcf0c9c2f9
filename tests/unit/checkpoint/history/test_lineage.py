"""Segments of a run's history: what a restart, a roll back and a new beginning abandon."""

from pathlib import Path

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState, crash
from tests.unit.checkpoint.test_asynchronous import complete, steps
from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.distributed.mesh import Mesh


def test_segments_follow_the_history(tmp_path: Path, mesh: Mesh) -> None:
    path = tmp_path / "lineage.json"
    lineage = SnapshotLineage(path, mesh)
    assert lineage.permitted() is None
    lineage.begin_segment(None)
    first = lineage.segment
    assert lineage.permitted() == {first: None}
    lineage.begin_segment((first, 40))
    second = lineage.segment
    assert second > first
    assert lineage.permitted() == {first: 40, second: None}
    # A roll back to a step of the first segment abandons the second.
    lineage.begin_segment((first, 30))
    third = lineage.segment
    assert third > second
    assert SnapshotLineage(path, mesh).permitted() == {first: 30, third: None}
    # A resume from storage abandons all snapshots.
    lineage.begin_segment(None)
    assert lineage.permitted() == {lineage.segment: None}


def test_a_segment_is_durable(tmp_path: Path, mesh: Mesh, fsyncs: Fsyncs) -> None:
    path = tmp_path / "lineage.json"
    SnapshotLineage(path, mesh).begin_segment(None)
    assert fsyncs.synced[tmp_path] == {"lineage.json"}
    assert path.read_bytes() in fsyncs.synced.values()


def test_a_damaged_history_permits_no_snapshot(tmp_path: Path, mesh: Mesh) -> None:
    path = tmp_path / "lineage.json"
    path.write_text("[[1")
    lineage = SnapshotLineage(path, mesh)
    assert lineage.permitted() == {}
    lineage.begin_segment(None)
    assert lineage.permitted() == {lineage.segment: None}


@pytest.mark.parametrize("kind", ["empty", "folder"])
def test_a_file_that_cannot_be_read_permits_no_snapshot(
    kind: str, tmp_path: Path, mesh: Mesh
) -> None:
    path = tmp_path / "lineage.json"
    if kind == "empty":
        path.touch()
    else:
        # Reading it raises EISDIR.
        path.mkdir()
    assert SnapshotLineage(path, mesh).permitted() == {}


def test_a_file_that_could_not_be_written_is_written_later(
    tmp_path: Path, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "disk"
    lineage = SnapshotLineage(folder / "lineage.json", mesh)
    lineage.begin_segment(None)
    lineage.write_pending()
    assert len(logged.records) == 1, "one warning per segment"
    folder.mkdir()
    lineage.write_pending()
    assert lineage.permitted() == {lineage.segment: None}


def test_snapshots_of_an_abandoned_generation_are_not_restored(manage: Manage, mesh: Mesh) -> None:
    """The snapshots survive, as copies on another machine do."""
    asynchronous = {"async_mode": "async", "ram_interval": 1, "interval": 1000}
    state = SmallState()
    manager = manage(state, **asynchronous)
    steps(manager, state, mesh, 1)
    manager.wait_for_saves()
    steps(manager, state, mesh, 4)
    complete(manager, mesh)
    crash(manager)
    # The next generation goes back, and takes no snapshot.
    earlier = SmallState()
    back = manage(earlier, load_step=1)
    assert back.restore() == f"{back.root}/step-1"
    newest = manage(SmallState(), **asynchronous)
    assert newest.restore() == "step 5 in shared memory", (
        "a generation without a step abandons none"
    )
    steps(back, earlier, mesh, 1)
    where = manage(SmallState(), **asynchronous).restore()
    assert where == f"{back.root}/step-2"
