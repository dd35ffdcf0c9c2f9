"""A run that saves to S3: a local server that fails 5% of the requests, and a trainer and its
writer that are killed during a save."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fsspec.core import url_to_fs

from tests.harness.launch import kill
from tests.harness.ranks import REPOSITORY
from tests.resilience.s3 import (
    BUCKET,
    ENVIRONMENT,
    FaultyServer,
    HeldRequest,
    make_manager,
    s3_server,
    take_step,
)
from tests.unit.checkpoint.conftest import SmallState, same
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.run_lease import FolderInUse, RunLease, lease_places, new_instance
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh

ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """The server, with the environment for this process and its children."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_server(0.05) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        # fsspec caches filesystems, and with them the address of an earlier server.
        type(url_to_fs(ROOT)[0]).clear_instance_cache()
        yield faults


def _restored(dump_folder: Path, mesh: Mesh) -> tuple[SmallState, str | None]:
    """Restore on another machine, which shares no memory with the run."""
    state = SmallState(seed=1)
    manager = make_manager(dump_folder, ROOT, state, mesh)
    where = manager.restore()
    manager.close()
    return state, where


def _after(num_steps: int) -> SmallState:
    state = SmallState()
    for _ in range(num_steps):
        state.take_step()
    return state


@pytest.mark.matrix
def test_runs_exclude_each_other(tmp_path: Path, s3: FaultyServer) -> None:
    """Runs with folders of their own, on machines of their own, save to one place."""

    def lease(name: str) -> RunLease:
        places = lease_places(tmp_path / name, ROOT, None)
        return RunLease(places, new_instance(), on_loss=lambda reason: None)

    first, second = lease("a"), lease("b")
    first.acquire(waits=False)
    assert first.places[1] == f"{ROOT}/lease.json"
    with pytest.raises(FolderInUse, match=f"{ROOT} is in use"):
        second.acquire(waits=False)
    first.release()
    second.acquire(waits=False)
    second.release()


def test_a_run_saves_and_resumes(tmp_path: Path, mesh: Mesh, s3: FaultyServer) -> None:
    state = SmallState()
    manager = make_manager(tmp_path / "here", ROOT, state, mesh)
    for _ in range(6):
        take_step(manager, state)
    assert manager.final_save(finished=True) == f"{ROOT}/step-6"
    manager.close()

    actual, where = _restored(tmp_path / "there", mesh)
    assert where == f"{ROOT}/step-6"
    assert actual.step == 6 and same(actual.tensors(), state.tensors())
    assert s3.requests > 20


@pytest.mark.matrix
@pytest.mark.parametrize(
    "object_name",
    ["manifest.json", "rank-00000.safetensors"],
)
def test_killed_during_a_save(
    tmp_path: Path, mesh: Mesh, s3: FaultyServer, object_name: str
) -> None:
    s3.held = held = HeldRequest(rf"/step-\d+/(.+/)?{re.escape(object_name)}$", number=2)
    command = [sys.executable, "-m", "tests.resilience.s3", str(tmp_path / "here"), ROOT]
    trainer = subprocess.Popen(command, cwd=REPOSITORY, env=dict(os.environ))
    try:
        assert held.reached.wait(120), trainer.poll()
    finally:
        # Stopped first: the trainer could start another writer after the first one is killed.
        trainer.send_signal(signal.SIGSTOP)
        kill([*psutil.Process(trainer.pid).children(recursive=True)])
        trainer.kill()
        trainer.wait()
        held.released.set()

    committed = {int(key.split("/step-")[1].split("/")[0]) for key in s3.put if "manifest" in key}
    steps = open_storage(ROOT).steps()
    assert committed and set(steps) == committed
    actual, where = _restored(tmp_path / "there", mesh)
    assert where == f"{ROOT}/step-{max(committed)}"
    assert same(actual.tensors(), _after(max(committed)).tensors())
