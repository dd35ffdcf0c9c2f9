"""What a run on a GPU records about itself: profiles, memory snapshots, collectives of NCCL."""

import json
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import run_ranks
from tests.gpu.training import train_job
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.fault_tolerance.replica.hang_handling import FLIGHT_SIGNAL, FlightRecorder
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import flight_record_file

pytestmark = pytest.mark.gpu


def test_the_profiler_records_kernels(device: str, tmp_path: Path) -> None:
    run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=device,
        overrides={
            "profiling.enable_profiling": True,
            "profiling.profile_freq": 4,
            "profiling.profiler_warmup": 1,
        },
    )
    (path,) = (tmp_path / "outputs" / "profile_traces").glob("iteration_4/*.json")
    categories = {event.get("cat") for event in json.loads(path.read_text())["traceEvents"]}
    assert "cpu_op" in categories
    assert ("kernel" in categories) == (device == "cuda")


def test_the_memory_snapshot_records_allocations(cuda: str, tmp_path: Path) -> None:
    run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=cuda,
        overrides={"profiling.enable_memory_snapshot": True, "profiling.profile_freq": 4},
    )
    (path,) = (tmp_path / "outputs" / "memory_snapshot").glob("iteration_4/*.pickle")
    # A file of this test's own run.
    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) > 2**20
    assert any(event["action"] == "alloc" for event in snapshot["device_traces"][0])


def record_collectives(device: str, folder: str) -> dict[str, Any]:
    """Call collectives in a world of one rank; return what the flight recorder writes."""
    comm = CommConfig()
    with start_mesh(ParallelismConfig(), comm, detect_device(device), folder):
        recorder = FlightRecorder(Path(folder), 0, {Phase.COMPUTE: 60.0})
        dist.all_reduce(torch.ones(7, device=device))
        dist.all_reduce(torch.ones(5))
        if device == "cuda":
            torch.cuda.synchronize()
        path = flight_record_file(Path(folder), 0)
        deadline_s = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline_s:
            signal.pthread_kill(recorder._thread.ident or 0, FLIGHT_SIGNAL)
            time.sleep(0.2)
        recorder.close()
        return json.loads(path.read_text())


def test_the_flight_record_has_the_collectives_of_nccl(cuda: str, tmp_path: Path) -> None:
    (record,) = run_ranks(record_collectives, tmp_path / "run", device=cuda, folder=str(tmp_path))
    called = {(entry["profiling_name"], str(entry["input_sizes"])) for entry in record["entries"]}
    assert ("nccl:all_reduce", "[[7]]") in called
    assert ("gloo:all_reduce", "[[5]]") in called
