"""A rank that hangs in a collective says in which. That it answers when it is asked is tested with
the launcher, which asks."""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_lite.launcher.flight import flight_file, read_flight

_RANK = """
import sys, time
from pathlib import Path
from datetime import timedelta
import torch
import torch.distributed as dist
from torchtitan_lite.log import configure_logging
from torchtitan_lite.phases import Phase
from torchtitan_lite.replica.flight_recorder import FlightRecorder

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
"""


def test_a_rank_says_in_which_collective_it_waits(tmp_path: Path) -> None:
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
    path, deadline_s = flight_file(tmp_path, 0), time.monotonic() + 200
    # Both, since rank 1 would write nothing any more once it goes on.
    while not (path.exists() and flight_file(tmp_path, 1).exists()):
        assert time.monotonic() < deadline_s and ranks[0].poll() is None
        time.sleep(0.05)
    (tmp_path / "go").touch()
    said = [one.communicate(timeout=100)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], said
    flight = read_flight(path)
    assert flight is not None
    (waits,) = flight.pending
    assert (waits.name, waits.sizes, waits.number) == ("gloo:all_reduce", "Float [7]", 2)
    assert waits.group.startswith("shards")
    assert "No progress in compute after step 5" in said[0]
    assert f"It waits in {waits.in_words}" in said[0]
    other = read_flight(flight_file(tmp_path, 1))
    assert other is not None and not other.pending
    assert other.newest[waits.group] == waits.number - 1
