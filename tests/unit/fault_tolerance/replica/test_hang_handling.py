"""A hanging rank: the watchdog ends it with its stacks, and the flight recorder names the
collective in which it waits. The tests of the launcher cover its requests to ranks."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d

from tests.harness.ranks import exit_status, send_output_to
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.distributed.torch_compat import flight_record
from torchtitan_lite.fault_tolerance.replica import hang_handling
from torchtitan_lite.fault_tolerance.replica.hang_handling import (
    FlightRecorder,
    HangWatchdog,
    phase_limits_s,
)
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    flight_record_file,
    read_flight_record,
)

_LIMIT_S = 1.0


def hung_here(keeps_interpreter: bool) -> None:
    if keeps_interpreter:
        ctypes.PyDLL(None).sleep(60)
    time.sleep(60)


def _hang(phase: Phase, keeps_interpreter: bool, output: str) -> None:
    send_output_to(output)
    dog = HangWatchdog(phase_limits_s(_LIMIT_S), has_launcher=False)
    dog.entered(phase, 0)
    hung_here(keeps_interpreter)


def _advance_slowly(output: str) -> None:
    """Take longer than the timeout in total, but each time far shorter: a slow machine is not a
    hang."""
    send_output_to(output)
    dog = HangWatchdog(phase_limits_s(_LIMIT_S), has_launcher=False)
    for _ in range(8):
        dog.entered(Phase.COMPUTE, 0)
        time.sleep(_LIMIT_S / 7)
    dog.entered(Phase.BETWEEN, 0)
    time.sleep(1.1 * _LIMIT_S)


_RANK = """
import sys, time
from pathlib import Path
from datetime import timedelta
import torch
import torch.distributed as dist
from torchtitan_lite.core.log import configure_logging
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.core.process_exit import exit_process
from torchtitan_lite.fault_tolerance.replica.hang_handling import FlightRecorder

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
configure_logging()
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
group = dist.new_group([0, 1], group_desc="shards")
recorder = FlightRecorder(folder, rank, {Phase.COMPUTE: 2.0})
dist.all_reduce(torch.ones(3), group=group)
recorder.entered(Phase.COMPUTE, 5)
if rank == 1:
    while not (folder / "go").exists():
        time.sleep(0.05)
dist.all_reduce(torch.ones(7), group=group)
recorder.close()
# As every command ends: a thread of torch may abort while the interpreter is torn down.
exit_process(0)
"""


@pytest.mark.parametrize(
    ("phase", "keeps_interpreter"),
    [(Phase.COMPUTE, False), (Phase.COMPUTE, True), (Phase.COMMUNICATION, False)],
    ids=["in Python", "in compiled code that keeps the interpreter", "waiting for others"],
)
def test_a_hanging_process_ends_with_its_stacks(
    phase: Phase, keeps_interpreter: bool, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert exit_status(_hang, phase, keeps_interpreter, str(output), timeout_s=50) == 1
    assert "Timeout" in output.read_text() and "hung_here" in output.read_text()


def test_progress_resets_the_timeout(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert exit_status(_advance_slowly, str(output)) == 0
    assert output.read_text() == ""


@pytest.mark.matrix
def test_a_rank_reports_the_collective_in_which_it_waits(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    path, deadline_s = flight_record_file(tmp_path, 0), time.monotonic() + 200
    # Both ranks, because rank 1 would no longer write once it continues.
    while not (path.exists() and flight_record_file(tmp_path, 1).exists()):
        assert time.monotonic() < deadline_s and ranks[0].poll() is None
        time.sleep(0.05)
    (tmp_path / "go").touch()
    output = [one.communicate(timeout=100)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], output
    flight = read_flight_record(path)
    assert flight is not None
    (waits,) = flight.pending
    assert (waits.name, waits.sizes, waits.number) == ("gloo:all_reduce", "Float [7]", 2)
    assert waits.group.startswith("shards")
    assert "No progress in compute after step 5" in output[0]
    assert f"It waits in {waits.description}" in output[0]
    other = read_flight_record(flight_record_file(tmp_path, 1))
    assert other is not None and not other.pending
    assert other.newest[waits.counter] == waits.number - 1


def test_the_flight_record_contains_the_calls_of_gloo_and_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's recorder is a stand-in, because it records on a GPU only."""
    recorders = {
        "_dump_fr_trace_json": {
            "version": "2.10",
            "entries": [_called("gloo", 1), _called("gloo", 4)],
        },
        "_dump_nccl_trace_json": {"pg_config": {"0": {}}, "entries": [_called("nccl", 2)]},
    }
    for name, record in recorders.items():
        text = json.dumps(record).encode()
        monkeypatch.setattr(
            _distributed_c10d, name, lambda text=text, **options: text, raising=False
        )
    merged = flight_record()
    assert [entry["profiling_name"] for entry in merged["entries"]] == ["gloo", "nccl", "gloo"]
    assert merged["version"] == "2.10" and merged["pg_config"] == {"0": {}}


def _called(name: str, time_ns: int) -> dict[str, object]:
    return {"profiling_name": name, "time_created_ns": time_ns}


def test_collectives_of_a_former_world_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(number: int, created_ns: int) -> dict[str, object]:
        named = {"process_group": ["0", "shards"], "profiling_name": "gloo:all_reduce"}
        return {**named, "collective_seq_id": number, "time_created_ns": created_ns}

    entries = [entry(1, 100), entry(2, 200)]
    monkeypatch.setattr(hang_handling, "flight_record", lambda: {"entries": list(entries)})
    sigtimedwait = signal.sigtimedwait

    def ends_late(*given: Any) -> Any:
        received = sigtimedwait(*given)
        time.sleep(0.1)
        return received

    monkeypatch.setattr(signal, "sigtimedwait", ends_late)
    recorder = FlightRecorder(tmp_path, 0, {Phase.COMPUTE: 60.0})
    try:
        entries.append(entry(1, 300))
        recorder.write()
    finally:
        recorder.close()
    assert not recorder._thread.is_alive()
    written = json.loads(flight_record_file(tmp_path, 0).read_text())["entries"]
    assert [one["time_created_ns"] for one in written] == [300]
