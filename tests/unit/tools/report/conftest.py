"""Small runs, written by the real sinks."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.core.outputs import (
    GOODPUT_FILE,
    LAUNCH_EVENTS,
    LAUNCH_LOGS,
    METRICS,
    replica_folder,
)
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.training.metrics import Event, StepRecord
from torchtitan_lite.training.metrics.goodput import GoodputTracker
from torchtitan_lite.training.metrics.jsonl import JsonLines

START = 1_700_000_000.0
"""Unix time at which the runs of these tests start."""
CONFIG = """[job]
description = "a small run"

[model]
name = "llama3"
flavor = "tiny"

[training]
steps = 4

[optimizer]
lr = 0.001
"""

MakeRun = Callable[..., Path]


def record(step: int, **changes: Any) -> StepRecord:
    """Return a record of a step that ends `10 + step` seconds after START."""
    values: dict[str, Any] = {
        "step": step,
        "loss": 8.0 - step / 10,
        "grad_norm": 1.0 / step,
        "lr": 1e-3,
        "tokens": 4096 * step,
        "num_target_tokens": 4095,
        "tokens_per_second": 4096.0,
        "mfu": 0.4,
        "memory_gib": 0.5,
        "step_time_s": 1.0,
        "data_time_s": 0.01,
        "checkpoint_stall_s": 0.0,
        "gc_time_s": 0.0,
        "num_replicas": 1,
        "goodput": 0.5,
        "time": START + 10 + step,
    }
    return StepRecord(**(values | changes))


def event(name: str, step: int, after_s: float, **values: Any) -> Event:
    """Return an event `after_s` seconds after START."""
    return Event(name=name, step=step, values=values, time=START + after_s)


def write_metrics(path: Path, lines: Sequence[StepRecord | Event]) -> None:
    """Write records with the sink of a run."""
    sink = JsonLines(path, 0)
    for line in lines:
        if isinstance(line, StepRecord):
            sink.step(line)
        else:
            sink.event(line)
    sink.close()


def write_goodput(folder: Path, *, compute_s: int, startup_s: int) -> None:
    """Write a file with the time accounting of a run."""
    now_ns = 0
    accounting = GoodputTracker(
        folder / GOODPUT_FILE,
        started_ns=0,
        resumes=False,
        clock=lambda: now_ns,
        compiled_ns=lambda: 0,
    )
    now_ns = startup_s * 10**9
    accounting.entered(Phase.QUORUM, 0)
    accounting.entered(Phase.COMPUTE, 0)
    now_ns += compute_s * 10**9
    accounting.entered(Phase.CHECKPOINT, 1)
    accounting.close()


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run without replicas and return its folder."""

    def make(
        name: str = "run",
        *,
        steps: int = 4,
        changes: Mapping[int, Mapping[str, Any]] | None = None,
        events: Sequence[Event] = (),
        config: str = CONFIG,
    ) -> Path:
        folder = tmp_path / name
        records = [record(step, **(changes or {}).get(step, {})) for step in range(1, steps + 1)]
        write_metrics(folder / METRICS, [*records, *events])
        write_goodput(folder, compute_s=8, startup_s=2)
        (folder / "config.toml").write_text(config)
        return folder

    return make


@pytest.fixture
def replicas(tmp_path: Path) -> Path:
    """A run of two replicas; the second is killed after step 2 and rejoins in step 4."""
    folder = tmp_path / "replicas"
    first = [record(step, num_replicas=1 if step == 3 else 2) for step in range(1, 5)]
    write_metrics(
        replica_folder(folder, 0) / METRICS,
        [
            *first[:2],
            event("start", 0, 11.1, process_age_s=10.0, parameters=1000, ranks=2, device="cpu"),
            event("step_failed", 2, 12.5, reason="connection <b>closed</b>"),
            *first[2:],
            event("saved", 4, 14.5, checkpoint_step=4),
            event("slow_rank", 4, 14.6, replica=1, rank=1, times_slower=1.5, is_slow=True),
        ],
    )
    other = [record(step, num_replicas=2, memory_gib=0.75) for step in (1, 2)]
    back = [record(4, num_replicas=2, memory_gib=0.75)]
    write_metrics(
        replica_folder(folder, 1) / METRICS,
        [
            *other,
            event("start", 0, 11.1, process_age_s=9.0, parameters=1000, ranks=2, device="cpu"),
            event("healed", 3, 13.5, sample=48, seconds=0.25),
            *back,
            event("start", 3, 14.1, process_age_s=0.8, parameters=1000, ranks=2, device="cpu"),
        ],
    )
    write_metrics(replica_folder(folder, 1) / "metrics_rank_1.jsonl", other)
    for number, compute_s in ((0, 8), (1, 3)):
        write_goodput(replica_folder(folder, number), compute_s=compute_s, startup_s=2)
        (replica_folder(folder, number) / "config.toml").write_text(CONFIG)
    logs = folder / LAUNCH_LOGS
    logs.mkdir()
    events = [
        (-100.0, "launcher started"),
        (-90.0, "replica 1: failed, rank 0: killed by SIGKILL"),
        (0.0, "launcher started"),
        (0.0, "lighthouse: listening on 127.0.0.1:1"),
        (0.5, "replica 0: started, logs in x"),
        (0.6, "replica 1: started, logs in x"),
        (12.25, "replica 1: failed, rank 0: killed by SIGKILL"),
        (12.75, "replica 1: started, logs in x"),
    ]
    lines = [json.dumps({"time": START + after, "text": text}) for after, text in events]
    (logs / LAUNCH_EVENTS).write_text("\n".join(lines) + "\n")
    return folder
