"""Exports that several ranks write together: the folder of a single process, or none."""

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.hugging_face import make_folder
from tests.harness.ranks import FORK_SERVER, GLOO_TIMEOUT_S, WorkerPool
from tests.unit.checkpoint.faulty_writer import PowerLossDisk, RecordingFiles, SlowFiles
from torchtitan_lite.checkpoint import recorded_config
from torchtitan_lite.checkpoint.convert.conversion import TargetExists, lock_folder
from torchtitan_lite.checkpoint.convert.hugging_face import partial_folder, shared_export
from torchtitan_lite.checkpoint.convert.hugging_face.export import ExportFile, ExportTensor
from torchtitan_lite.checkpoint.convert.hugging_face.partial_folder import PartialFolder
from torchtitan_lite.checkpoint.convert.hugging_face.shared_export import (
    assign_files,
    export_on_all_ranks,
)
from torchtitan_lite.checkpoint.convert.hugging_face.to_hf import HuggingFaceExport
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.models import model_spec

Pools = Callable[[int], WorkerPool]
_FILE_BYTES = 60_000
_LOST_RANK = 3
"""Exit status of a rank that has lost another."""


class WatchedFiles(Files):
    """Records the weight files that this process completes, and before the n-th one, counted from
    0, does something."""

    def __init__(self, number: int = -1, action: Callable[[], None] = lambda: None) -> None:
        self.completed: list[str] = []
        self._number, self._action = number, action

    def rename(self, path: Path, target: Path) -> None:
        if path.suffix == ".safetensors":
            if len(self.completed) == self._number:
                self._action()
            self.completed.append(path.name)
        super().rename(path, target)


def new_export(
    checkpoint: Path, target: Path, files: Files, max_bytes: int = _FILE_BYTES
) -> HuggingFaceExport:
    source = StoredSnapshot(*open_parent_storage(str(checkpoint)))
    model = recorded_config(source.manifest.config, source.where).model
    return HuggingFaceExport(
        source,
        target,
        model_spec(model),
        max_shard_bytes=max_bytes,
        assets=checkpoint.parent / "assets",
        files=files,
    )


def import_model(tmp_path: Path, family: str) -> Path:
    folder = make_folder(tmp_path / "hf", family)
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "ours")]) == 0
    return tmp_path / "ours" / "step-0"


def export_alone(checkpoint: Path, target: Path, max_bytes: int = _FILE_BYTES) -> dict[str, bytes]:
    """Export in this process, and return the content of each file."""
    export = new_export(checkpoint, target, Files(), max_bytes)
    export.run(num_workers=1, written=lambda count: None)
    return contents(target)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")}


def export_together(checkpoint: Path, target: Path, max_bytes: int = _FILE_BYTES) -> list[str]:
    files = WatchedFiles()
    export_on_all_ranks(lambda: new_export(checkpoint, target, files, max_bytes))
    return files.completed


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_tied", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("gpt_oss", "mixtral", "llama4", "qwen3_next")
        ),
    ],
)
def test_the_folder_is_that_of_a_single_writer(family: str, tmp_path: Path, pools: Pools) -> None:
    checkpoint = import_model(tmp_path, family)
    expected = export_alone(checkpoint, tmp_path / "alone")
    weights = {name for name in expected if name.endswith(".safetensors")}
    assert len(weights) >= 4 and {"config.json", "model.safetensors.index.json"} < set(expected)
    for size in (1, 2, 4):
        target = tmp_path / "out" / f"of_{size}"
        of_ranks = pools(size).run(export_together, checkpoint, target)
        assert contents(target) == expected
        assert all(of_ranks) and sorted(chain(*of_ranks)) == sorted(weights)
    assert sorted(os.listdir(tmp_path / "out")) == ["of_1", "of_2", "of_4"]


def test_there_may_be_more_ranks_than_files(tmp_path: Path, pools: Pools) -> None:
    checkpoint = import_model(tmp_path, "llama_tied_stretched")
    for number, max_bytes in ((1, 10**9), (2, 240_000)):
        expected = export_alone(checkpoint, tmp_path / f"alone_{number}", max_bytes)
        target = tmp_path / f"out_{number}"
        of_ranks = pools(4).run(export_together, checkpoint, target, max_bytes)
        assert contents(target) == expected
        assert sorted(map(len, of_ranks)) == [0] * (4 - number) + [1] * number


def test_files_are_distributed_by_bytes() -> None:
    sizes = [5, 1, 9, 4, 4, 7]
    files = [
        ExportFile(str(size), (ExportTensor("", "", None, (size,), torch.int8),)) for size in sizes
    ]
    shares = assign_files(files, [2, 0, 1])
    assert {rank: [one.num_bytes for one in share] for rank, share in shares.items()} == {
        2: [9, 1],
        0: [7, 4],
        1: [5, 4],
    }


def fail_on(rank: int, error: Exception, checkpoint: Path, target: Path) -> tuple[str, str]:
    """Return the class and the text of the error that this rank raises."""

    def raise_it() -> None:
        raise error

    files = WatchedFiles(0, raise_it) if dist.get_rank() == rank else Files()
    try:
        export_on_all_ranks(lambda: new_export(checkpoint, target, files))
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "", ""


@pytest.mark.parametrize(
    ("rank", "error", "text"),
    [
        (0, OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (1, OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (2, ValueError("a bug"), "unexpected ValueError('a bug')"),
    ],
)
def test_an_error_of_one_rank_is_one_error_on_all(
    rank: int, error: Exception, text: str, tmp_path: Path, pools: Pools
) -> None:
    checkpoint = import_model(tmp_path, "qwen3_tied")
    before = sorted(tmp_path.iterdir())
    outcomes = pools(3).run(fail_on, rank, error, checkpoint, tmp_path / "out")
    assert outcomes == [outcomes[0]] * 3
    assert outcomes[0][0] == "CheckpointError" and text in outcomes[0][1]
    assert sorted(tmp_path.iterdir()) == before
    pools(3).run(export_together, checkpoint, tmp_path / "out")
    assert contents(tmp_path / "out") == export_alone(checkpoint, tmp_path / "alone")


def join_and_die(rank: int, killed: int, store: Path, checkpoint: Path, target: Path) -> None:
    """Export as one of three ranks, one of which is killed before it completes its second file."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), 3),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )
    files = (
        WatchedFiles(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if rank == killed
        else SlowFiles(0.05)
    )
    try:
        export_on_all_ranks(lambda: new_export(checkpoint, target, files))
    except RuntimeError:
        # gloo's.
        os._exit(_LOST_RANK)


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_leaves_no_folder_and_the_next_export_continues(
    killed: int, tmp_path: Path, pools: Pools
) -> None:
    checkpoint = import_model(tmp_path, "mixtral")
    arguments = (tmp_path / "store", checkpoint, tmp_path / "out")
    ranks = [
        FORK_SERVER.Process(target=join_and_die, args=(rank, killed, *arguments))
        for rank in range(3)
    ]
    started = time.monotonic()
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    # Long before the collectives time out.
    assert time.monotonic() - started < 60
    expected = [-signal.SIGKILL if rank == killed else _LOST_RANK for rank in range(3)]
    assert [rank.exitcode for rank in ranks] == expected
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob(".out.converting-*")
    complete = {path.name for path in partial.glob("*.safetensors")}
    assert complete
    again = set(chain(*pools(2).run(export_together, checkpoint, tmp_path / "out")))
    assert contents(tmp_path / "out") == export_alone(checkpoint, tmp_path / "alone")
    assert again and not complete & again
    assert not list(tmp_path.glob(".*"))


def export_elsewhere(what: str, checkpoint: Path, target: Path) -> list[str]:
    """Export with a rank 1 that has its own disks."""
    files = WatchedFiles()
    is_alone = dist.get_rank() == 1

    def prepare() -> HuggingFaceExport:
        if is_alone and what == "source":
            return new_export(checkpoint.with_name("step-9"), target, files)
        own = target.parent / "local" / target.name if is_alone and what == "target" else target
        max_bytes = 70_000 if is_alone and what == "options" else _FILE_BYTES
        return new_export(checkpoint, own, files, max_bytes)

    export_on_all_ranks(prepare)
    return files.completed


@pytest.mark.parametrize("what", ["source", "target", "options"])
def test_a_rank_that_does_not_share_the_folders_writes_nothing(
    what: str, tmp_path: Path, pools: Pools
) -> None:
    checkpoint = import_model(tmp_path, "qwen3_tied")
    of_ranks = pools(3).run(export_elsewhere, what, checkpoint, tmp_path / "out")
    assert contents(tmp_path / "out") == export_alone(checkpoint, tmp_path / "alone")
    assert of_ranks[0] and not of_ranks[1] and of_ranks[2]


def export_if_absent(checkpoint: Path, target: Path) -> str:
    try:
        export_together(checkpoint, target)
    except TargetExists as error:
        return str(error)
    return ""


def test_all_ranks_learn_that_another_process_exports(tmp_path: Path, pools: Pools) -> None:
    checkpoint = import_model(tmp_path, "qwen3_tied")
    target = tmp_path / "out"
    path = new_export(checkpoint, target, Files()).folder.path
    path.mkdir()
    with lock_folder(path):
        texts = pools(2).run(export_if_absent, checkpoint, target)
    assert texts == [f"Another process is writing {path}."] * 2
    assert pools(2).run(export_if_absent, checkpoint, target) == ["", ""]
    texts = pools(2).run(export_if_absent, checkpoint, target)
    assert texts == [texts[0]] * 2 and texts[0].startswith(f"{target} already exists.")


def overtaken_on(rank: int, checkpoint: Path, target: Path) -> str:
    """Export while another replica completes the target."""

    def overtake() -> None:
        (partial,) = target.parent.glob(f".{target.name}.converting-*")
        partial.rename(target)

    files = WatchedFiles(1, overtake) if dist.get_rank() == rank else SlowFiles(0.1)
    try:
        export_on_all_ranks(lambda: new_export(checkpoint, target, files))
    except TargetExists as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_that_is_overtaken_leaves_the_folder_alone(
    rank: int, tmp_path: Path, pools: Pools
) -> None:
    checkpoint = import_model(tmp_path, "qwen3_tied")
    target = tmp_path / "out"
    texts = pools(2).run(overtaken_on, rank, checkpoint, target)
    assert texts == [texts[0]] * 2 and texts[0].startswith(f"{target} already exists.")
    assert list(target.glob("*.safetensors"))


def export_slowly(checkpoint: Path, target: Path) -> float:
    """Export with collectives that time out after a second, and a rank that needs longer. Returns
    the seconds."""
    slow = SlowFiles(3.0, number=1) if dist.get_rank() == 1 else Files()
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        mesh.set_timeout(1.0)
        try:
            started = time.monotonic()
            export_on_all_ranks(lambda: new_export(checkpoint, target, slow))
            return time.monotonic() - started
        finally:
            mesh.set_timeout(GLOO_TIMEOUT_S)


def test_no_collective_times_out_while_a_rank_writes(tmp_path: Path, pools: Pools) -> None:
    checkpoint = import_model(tmp_path, "qwen3_tied")
    assert min(pools(2).run(export_slowly, checkpoint, tmp_path / "out")) > 3
    assert contents(tmp_path / "out") == export_alone(checkpoint, tmp_path / "alone")


def test_a_superseded_attempt_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    stale, again = (PartialFolder(target, "token", Files()) for _ in range(2))
    with stale.open(), stale.writing("a") as path:
        path.write_bytes(b"complete")
    # Rank 0 was killed, but another rank lives.
    with again.open():
        assert again.done() >= {"a"}
        with pytest.raises(FileNotFoundError), stale.writing("b") as path:
            path.write_bytes(b"stale")
        with pytest.raises(CheckpointError, match="is not the folder that rank 0 writes to"):
            stale.join(stale.attempt)
        again.finish()
    assert contents(target) == {"a": b"complete"}


@pytest.mark.parametrize("is_finished", [False, True])
def test_complete_files_survive_a_power_loss(tmp_path: Path, is_finished: bool) -> None:
    disk, found = tmp_path / "disk", tmp_path / "found"
    disk.mkdir()
    files = RecordingFiles(disk)
    folder = PartialFolder(disk / "out", "token", files)
    with folder.open():
        with folder.writing("a") as path:
            files.write_file(path, b"complete")
        if is_finished:
            folder.finish()
    lost = PowerLossDisk(disk)
    for operation in files.log:
        lost.replay(operation)
    lost.after_crash(found, 0.0, seed=0)
    name = "out" if is_finished else folder.path.name
    assert (found / name / "a").read_bytes() == b"complete"
    assert not is_finished or contents(found / name) == {"a": b"complete"}


def test_attempts_of_two_machines_end_with_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock does not reach from one machine to another."""
    target = tmp_path / "out"
    here, there = (PartialFolder(target, "token", Files()) for _ in range(2))
    with pytest.raises(TargetExists), here.open():
        monkeypatch.setattr(partial_folder, "abstract_socket_scope", lambda: 1)
        monkeypatch.setattr(partial_folder, "lock_folder", unlocked)
        with there.open():
            for folder in (here, there):
                with folder.writing("a") as path:
                    path.write_bytes(b"complete")
            there.finish()
        with here.writing("b") as path:
            path.write_bytes(b"late")
    assert contents(target) == {"a": b"complete"}
    assert os.listdir(tmp_path) == ["out"]


def unlocked(folder: Path) -> Any:
    return nullcontext()


def test_a_rank_writes_for_the_attempt_of_the_leader(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", "token", Files())
    (folder.path / "attempt").mkdir(parents=True)
    export: Any = SimpleNamespace(folder=folder)
    assert "differs" in shared_export._join(export, "another", "attempt") and not folder.attempt
    assert "is not the folder" in shared_export._join(export, folder.path.name, "missing")
    assert shared_export._join(export, folder.path.name, "attempt") == ""
    assert folder.attempt == "attempt"
