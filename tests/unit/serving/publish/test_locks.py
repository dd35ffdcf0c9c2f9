"""Published memory is freed if, and only if, no process uses it."""

import json
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.harness import launch
from tests.harness.ranks import FORK_SERVER
from tests.unit.serving.publish.conftest import Publish, open_publisher, received
from torchtitan_lite.checkpoint.shared_memory import (
    PUBLISHED,
    SHARED_MEMORY,
    RankLock,
    Region,
    SharedMemoryRun,
    free_run,
    list_runs,
    region_files,
    remove_regions,
    shared_memory_folder,
    slot_lock_path,
)
from torchtitan_lite.cli import inspect
from torchtitan_lite.cli.parsers import parser
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import CheckpointError, PublishError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.serving.publish import Subscriber
from torchtitan_lite.serving.publish import publisher as module
from torchtitan_lite.serving.publish.pins import SlotLock
from torchtitan_lite.serving.publish.sources import PUBLISHED_FILE

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
_TENSORS = {"a": torch.ones(2, 3)}


def _publish_until_killed(folder: Path, run_id: str) -> None:
    """Publish versions 3 and 5."""
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        publisher = open_publisher(folder, run_id, mesh, _TENSORS)
        for version in (3, 5):
            assert publisher.publish(version, _TENSORS)
        publisher._finish_last()
        (folder / "ready").touch()
        time.sleep(300)


def _start(folder: Path, run_id: str) -> BaseProcess:
    process = FORK_SERVER.Process(target=_publish_until_killed, args=(folder, run_id))
    process.start()
    launch.wait_until((folder / "ready").exists, 60)
    return process


def _listed(run_id: str) -> list[SharedMemoryRun]:
    return [run for run in list_runs() if run.run_id == run_id]


def _inspect(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    options = parser().parse_args(["inspect", "--shm", *arguments])
    assert inspect.run(options, []) == status
    printed = capsys.readouterr()
    return printed.out if status == 0 else printed.err


def test_a_live_publisher_is_listed_and_only_a_dead_one_is_freed(
    tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = _start(tmp_path, run_id)
    try:
        (run,) = _listed(run_id)
        assert run.owners == {(PUBLISHED, 0): process.pid}
        assert run.is_used and run.pinned == ()
        text = _inspect(capsys)
        own = next(part for part in text.split("run ") if part.startswith(run_id))
        assert "published weights of 1 ranks, complete steps: 3, 5\n" in own
        assert f"published weights of rank 0 are written by process {process.pid}\n" in own
        assert "still writes" in _inspect(capsys, "--free", run_id, status=2)
        # What a run without snapshots does at its end.
        remove_regions(run_id)
        with Subscriber(str(tmp_path)) as subscriber:
            assert subscriber.newest() == 5
    finally:
        process.kill()
        process.join()
    (run,) = _listed(run_id)
    assert (run.ranks[PUBLISHED], run.is_used) == ((0,), False)
    record = next(
        one for one in json.loads(_inspect(capsys, "--json"))["runs"] if one["run_id"] == run_id
    )
    assert record["published"] == {"ranks": [0], "steps": [3, 5], "writers": {}, "pinned": []}
    assert f"Freed run {run_id}." in _inspect(capsys, "--free", run_id)
    assert not _listed(run_id)


def test_a_version_that_is_read_is_in_use(tmp_path: Path, run_id: str) -> None:
    process = _start(tmp_path, run_id)
    try:
        with Subscriber(str(tmp_path)) as subscriber:
            (rank,) = subscriber.publication.ranks
            pinned = rank.pin(3)
            process.kill()
            process.join()
            (run,) = _listed(run_id)
            assert (run.pinned, run.owners, run.is_used) == ((0,), {}, True)
            with pytest.raises(CheckpointError, match=r"a subscriber holds .*published-00000-0"):
                free_run(run_id)
            (block,) = received(pinned, [("a", (slice(0, 2), slice(0, 3)))])
            assert block.eq(1).all()
            pinned.release()
    finally:
        process.kill()
        process.join()
    assert not _listed(run_id)[0].is_used
    assert free_run(run_id) > 0


def _is_mapped(run_id: str) -> bool:
    return run_id in Path("/proc/self/maps").read_text()


def test_what_a_run_has_left_is_unmapped_when_it_restarts(tmp_path: Path, run_id: str) -> None:
    process = _start(tmp_path, run_id)
    try:
        subscriber = Subscriber(str(tmp_path))
        process.kill()
        process.join()
        # Until then it can be read.
        assert subscriber.newest() == 5 and _is_mapped(run_id)
        for path in region_files(shared_memory_folder(run_id), PUBLISHED).values():
            path.unlink()
        assert subscriber.newest() is None and not _is_mapped(run_id)
        assert subscriber.newest() is None
        (tmp_path / "ready").unlink()
        process = _start(tmp_path, run_id)
        assert subscriber.newest() == 5
        subscriber.close()
    finally:
        process.kill()
        process.join()


def test_versions_of_an_earlier_start_are_not_read(tmp_path: Path, run_id: str) -> None:
    process = _start(tmp_path, run_id)
    try:
        subscriber = Subscriber(str(tmp_path))
        # The run restarts on another machine, in the same output folder.
        path = tmp_path / PUBLISHED_FILE
        announced = json.loads(path.read_text())
        other = json.dumps(announced | {"generation_id": "of another machine"})
        path.with_suffix(".part").write_text(other)
        path.with_suffix(".part").rename(path)
        time.sleep(1.1)
        # Storage counts only if the publisher on this machine has ended.
        assert subscriber.newest() == 5
        process.kill()
        process.join()
        launch.wait_until(lambda: subscriber.newest() is None, 10)
        with pytest.raises(PublishError, match="has published nothing yet, or has ended"):
            Subscriber(str(tmp_path), timeout_s=0)
        subscriber.close()
    finally:
        process.kill()
        process.join()


def test_free_without_a_run_keeps_published_versions_in_use(tmp_path: Path) -> None:
    runs = {name: shared_memory_folder(name * 32, base=tmp_path) for name in ("a", "b", "c")}
    for folder in runs.values():
        Region.create(folder, 0, {}, 4096, kind=PUBLISHED).close()
        slot_lock_path(folder, 0, 2).touch()
    lock = RankLock(runs["a"], 0, PUBLISHED)
    pin = SlotLock(slot_lock_path(runs["b"], 0, 2), exclusive=False)
    assert lock.try_acquire() and pin.try_acquire()
    options = parser().parse_args(["inspect", "--shm", "--free", "--yes"])
    assert inspect.run(options, [], tmp_path) == 0
    assert [name for name, folder in runs.items() if folder.exists()] == ["a", "b"]
    lock.release()
    pin.release()
    assert inspect.run(options, [], tmp_path) == 0
    assert not any(folder.exists() for folder in runs.values())


def test_a_new_generation_removes_what_killed_publishers_left(
    run_id: str, publish: Publish, tmp_path: Path
) -> None:
    folder = shared_memory_folder(run_id)
    for rank in range(3):
        Region.create(folder, rank, {}, 4096, kind=PUBLISHED).close()
        slot_lock_path(folder, rank, 0).touch()
    publisher = publish(_TENSORS)
    assert list(region_files(folder, PUBLISHED)) == [0]
    assert not [path for path in folder.iterdir() if "published-00000" not in path.name]
    publisher.close()
    assert not folder.exists()
    assert not (tmp_path / PUBLISHED_FILE).exists()


def test_one_process_publishes_for_a_rank(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EARLIER_END_S", 0.1)
    publisher = publish(_TENSORS)
    assert publisher.publish(1, _TENSORS)
    with pytest.raises(CheckpointError, match="already publishes the weights of rank 0"):
        publish(_TENSORS)
    publisher._finish_last()
    with Subscriber(str(tmp_path)) as subscriber:
        assert subscriber.newest() == 1


def test_a_publisher_that_cannot_start_leaves_nothing(
    run_id: str, publish: Publish, tmp_path: Path
) -> None:
    # An address for documentation, of no interface.
    with pytest.raises(CheckpointError, match=r"'192\.0\.2\.1', port 0, cannot be used"):
        publish(_TENSORS, address="192.0.2.1")
    assert not _listed(run_id)
    assert not (tmp_path / PUBLISHED_FILE).exists()


def test_an_interface_gives_the_address(publish: Publish, tmp_path: Path) -> None:
    publish(_TENSORS, address="lo")
    announced = json.loads((tmp_path / PUBLISHED_FILE).read_text())
    assert announced["url"].startswith("http://127.0.0.1:")


def test_a_version_that_lacks_a_tensor_is_not_published(
    publish: Publish, logged: pytest.LogCaptureFixture
) -> None:
    tensors = _TENSORS | {"b": torch.ones(1)}
    publisher = publish(tensors)
    assert not publisher.publish(1, _TENSORS)
    assert publisher.publish(2, tensors)
    (record,) = logged.records
    assert "they lack b, and have none beside it" in record.getMessage()
