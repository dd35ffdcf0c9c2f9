"""A checkpoint folder on an unreliable disk, or with symbolic links from others."""

import itertools
import os
import random
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.snapshots import content
from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint.format import MANIFEST
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox

FILE = "rank-00000.safetensors"


class FailingOnce(Files):
    """Fails its n-th rename or sync of a folder, counted from 1, without effect or after it."""

    def __init__(self) -> None:
        self.left, self.after = 0, False

    def _fails(self) -> bool:
        self.left -= 1
        return self.left == 0

    def rename(self, path: Path, target: Path) -> None:
        fails = self._fails()
        if not fails or self.after:
            super().rename(path, target)
        if fails:
            raise OSError(5, "injected")

    def sync_folder(self, path: Path) -> None:
        if self._fails():
            raise OSError(5, "injected")
        super().sync_folder(path)


def _write(folder: LocalStorage, step: int, token: str, seed: int) -> None:
    """Write everything of an attempt except its commit."""
    data = memoryview(content(0, seed, 5000))
    folder.write(step, token, FILE, [PartBox("w", "U8", (5000,), 0, 5000)], [data])
    attempts.put_part(folder, step, token, 0, {"rank": 0})


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_failed_commit_is_retried(tmp_path: Path, replaces: bool, after: bool) -> None:
    for number in itertools.count(1):
        files = FailingOnce()
        root = tmp_path / str(number)
        folder = LocalStorage(root, files)
        if replaces:
            _write(folder, 3, "a-0", seed=1)
            folder.commit(3, "a-0", b"older")
        _write(folder, 3, "b-0", seed=2)
        files.left, files.after = number, after
        try:
            folder.commit(3, "b-0", b"newer")
        except OSError:
            # The writer's view: all parts still exist, so it commits again.
            announced = attempts.announcements(folder, 3, "b-0")
            assert attempts.read_part(folder, announced, 0) == {"rank": 0}, number
            assert not replaces or folder.steps() == [3]
            folder.commit(3, "b-0", b"newer")
        assert {path.name for path in root.iterdir()} == {"step-3"}, number
        assert {path.name for path in (root / "step-3").iterdir()} == {MANIFEST, FILE}
        assert (root / "step-3" / MANIFEST).read_bytes() == b"newer"
        assert content(0, 2, 5000) in (root / "step-3" / FILE).read_bytes()
        if files.left > 0:
            assert number > 3
            break


def test_an_announced_part_is_durable(tmp_path: Path, fsyncs: Fsyncs) -> None:
    folder = LocalStorage(tmp_path, Files())
    _write(folder, 3, "a-0", seed=1)
    assert "rank-00000.json" in fsyncs.synced[tmp_path / ".writing-step-3-a-0"]


def test_a_step_is_durable_before_the_one_that_it_replaces_is_removed(
    tmp_path: Path, fsyncs: Fsyncs
) -> None:
    """A crash between the two renames of a commit, or right after them."""
    folder = LocalStorage(tmp_path, Files())
    _write(folder, 3, "a-0", seed=1)
    folder.commit(3, "a-0", b"older")
    fsyncs.synced.clear()
    (tmp_path / "step-3").rename(tmp_path / ".replaced-step-3")
    folder.steps(repairs=True)
    assert fsyncs.synced[tmp_path] == {"step-3"}
    (tmp_path / ".replaced-step-3").mkdir()
    fsyncs.synced.clear()
    folder.steps(repairs=True)
    assert fsyncs.synced[tmp_path] == {"step-3", ".replaced-step-3"}
    assert folder.steps() == [3]


def test_a_removed_attempt_commits_nothing(tmp_path: Path) -> None:
    folder = LocalStorage(tmp_path, Files())
    _write(folder, 3, "a-0", seed=1)
    folder.commit(3, "a-0", b"older")
    with pytest.raises(FileNotFoundError, match=r"step-3 is of another attempt"):
        folder.commit(3, "b-0", b"newer")
    with pytest.raises(FileNotFoundError):
        folder.commit(4, "b-0", b"newer")
    assert folder.steps() == [3] and (tmp_path / "step-3" / MANIFEST).read_bytes() == b"older"


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    root, precious = tmp_path / "checkpoint", tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    folder = LocalStorage(root, Files())
    for name in (".deleting-step-1", ".writing-step-1-b-0", "step-7"):
        root.mkdir(exist_ok=True)
        (root / name).symlink_to(precious)
    (precious / MANIFEST).write_text("{}")
    attempts.remove_stale_attempts(folder, 5)
    folder.delete(7)
    (root / ".deleting-step-1").symlink_to(precious)
    attempts.recover(folder, "c")
    assert list(root.iterdir()) == []

    folder.write(3, "a-0", "", [], [])
    (root / ".writing-step-3-a-0" / "step-3" / FILE).symlink_to(precious / "file")
    (root / ".writing-step-3-a-0" / "rank-00000.json.new").symlink_to(precious / "file")
    data = memoryview(content(0, 1, 5000))
    with pytest.raises(OSError, match="symbolic"):
        folder.write(3, "a-0", FILE, [PartBox("w", "U8", (5000,), 0, 5000)], [data])
    with pytest.raises(OSError, match="symbolic"):
        attempts.put_part(folder, 3, "a-0", 0, {"rank": 0})
    attempts.abandon(folder, 3, "a-0")
    assert (precious / "file").read_text() == "kept" and (precious / MANIFEST).exists()


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Limit the number of further files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + free, hard))
    yield free
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_are_read_than_may_be_open(tmp_path: Path, few_descriptors: int) -> None:
    names = [f"{number}" for number in range(few_descriptors + 100)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 2000)
    folder = LocalStorage(tmp_path, Files())
    rng = random.Random(0)
    order = [rng.choice(names) for _ in range(3000)] + names

    def read(name: str) -> bool:
        expected = name.encode() * 2000
        target = bytearray(len(expected))
        folder.read_into(name, 0, memoryview(target), lambda piece: None)
        return target == expected and bytes(folder.read(name)) == expected

    # No descriptor is closed and reused for another file while a thread reads.
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, order))
    folder.close()


def test_a_closed_folder_holds_no_file(tmp_path: Path) -> None:
    """Otherwise, the disk space of deleted checkpoints is not released."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    folder, target = LocalStorage(tmp_path, Files()), bytearray(7)
    with folder.read("file", 0, 4) as view:  # type: ignore[union-attr]
        folder.read_into("file", 0, memoryview(target), lambda piece: None)
        folder.close()
        assert bytes(view) == b"cont" and target == b"content"
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def test_folders_with_other_names_are_not_removed(tmp_path: Path) -> None:
    names = [
        ".writing-step-01-aa",
        ".writing-step-1",
        ".writing-x",
        ".deleting-x",
        "other",
        "step-1",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    attempts.recover(LocalStorage(tmp_path, Files()), "bb")
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_short_reads_are_seen_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    whole, seen, target = os.preadv, [], bytearray(90)
    monkeypatch.setattr(os, "preadv", lambda file, views, start: whole(file, [views[0][:7]], start))
    storage = LocalStorage(tmp_path, Files())
    storage.read_into("file", 5, memoryview(target), lambda piece: seen.append(bytes(piece)))
    storage.close()
    assert bytes(target) == b"".join(seen) == bytes(range(5, 95))
