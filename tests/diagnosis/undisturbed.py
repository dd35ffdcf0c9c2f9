"""Runs without faults, beside load and each other, in which every diagnosis is a false alarm."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.diagnosis.running_job import MESHES, JobMesh, RunningJob

_LOAD = (
    "import random, time\n"
    "while True:\n"
    " until = time.monotonic() + random.uniform(0.5, 20)\n"
    " while time.monotonic() < until: sum(range(1000))\n"
    " time.sleep(random.uniform(0.5, 20))\n"
)
"""Alternates between using a core and sleeping, as other users of a machine do."""
_NUM_LOADS = 6
_JOBS = (JobMesh("one process", 1, 1), MESHES["FSDP-4"], MESHES["2 replicas"])


def false_alarms(folder: Path, seconds: float) -> list[str]:
    """Run all jobs together for `seconds`, beside load, and return what they diagnosed."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(_load())
        jobs = [
            stack.enter_context(RunningJob(mesh, folder / mesh.name.replace(" ", "-")))
            for mesh in _JOBS
        ]
        for job in jobs:
            job.wait_until_ready(1)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and not any(job.has_ended for job in jobs):
            time.sleep(1)
        for job in jobs:
            name = job.mesh.name
            said = [f"{name}: {one['cause']}: {one['text']}" for one in job.diagnoses.read()]
            print(f"{name}: {job.last_step} steps, {len(said)} diagnoses", flush=True)
            found += said
            if job.has_ended:
                found.append(f"{name}: the job has ended:\n{job.log[-2000:]}")
    return found


@contextmanager
def _load() -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", _LOAD]) for _ in range(_NUM_LOADS)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
