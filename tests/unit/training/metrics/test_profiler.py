import json

import pytest
import torch

from torchtitan_lite.config.tables.profiling import ProfilingConfig
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.training.metrics import StepProfiler


@pytest.fixture
def run_steps(tmp_path):
    def run(first, last, **settings):
        config = ProfilingConfig(enable_profiling=True, **settings)
        profiler = StepProfiler(
            config, folder=tmp_path, rank=3, resume_step=first - 1, device_kind="cpu"
        )
        with profiler:
            for step in range(first, last + 1):
                with torch.profiler.record_function(f"region of step {step}"):
                    torch.ones(8, 8).sum()
                profiler.step(step)
        return sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))

    return run


def regions(path):
    events = json.loads(path.read_text())["traceEvents"]
    return {e["name"] for e in events if e.get("name", "").startswith("region of step")}


@pytest.mark.filterwarnings("error")
def test_each_cycle_writes_a_trace_of_its_last_step(run_steps, tmp_path):
    paths = run_steps(1, 9, profile_freq=4, profiler_warmup=1)
    assert [str(path) for path in paths] == [
        "profile_traces/iteration_4/rank3_trace.json",
        "profile_traces/iteration_8/rank3_trace.json",
    ]
    assert regions(tmp_path / paths[0]) == {"region of step 4"}
    assert regions(tmp_path / paths[1]) == {"region of step 8"}


def test_cycles_follow_the_step_number_after_a_resume(run_steps, tmp_path):
    (path,) = run_steps(3, 8, profile_freq=4, profiler_warmup=1)
    assert path.parts[1] == "iteration_8"
    assert regions(tmp_path / path) == {"region of step 8"}


def test_an_incomplete_cycle_at_the_end_has_its_own_file(run_steps, tmp_path):
    paths = run_steps(1, 3, profile_freq=4, profiler_warmup=1, profiler_active=2)
    assert [path.parts[1] for path in paths] == ["iteration_3_exit"]
    assert regions(tmp_path / paths[0]) == {"region of step 3"}


def test_disabled_profiler_does_nothing(tmp_path):
    profiler = StepProfiler(
        ProfilingConfig(), folder=tmp_path, rank=0, resume_step=0, device_kind="cpu"
    )
    with profiler:
        for step in range(1, 30):
            profiler.step(step)
    assert not list(tmp_path.iterdir())


def test_memory_snapshots_need_a_gpu(tmp_path):
    config = ProfilingConfig(enable_memory_snapshot=True)
    with pytest.raises(UserError, match="enable_memory_snapshot = true needs a GPU"):
        StepProfiler(config, folder=tmp_path, rank=0, resume_step=0, device_kind="cpu")
