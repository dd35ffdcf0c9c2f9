"""A diverged run reports why it stopped, and its time accounting."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import launch
from tests.harness.ranks import run_command
from torchtitan_lite.core.errors import DIVERGED


@pytest.mark.matrix
def test_a_diverged_run_writes_its_time_accounting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={folder}",
        "--checkpoint.enable=false",
        "--metrics.enable_tensorboard=true",
        "--training.steps=20",
        "--optimizer.lr=1e38",
        "--lr_scheduler.warmup_steps=0",
        "--debug.max_skipped_steps=2",
    ]
    text = run_command("train", *arguments, status=DIVERGED)
    assert "the last of 2 consecutive steps (debug.max_skipped_steps)" in text
    assert "Goodput" in text
    assert launch.steps_of(folder)[-1]["skipped"]
    events = {event["event"]: event for event in launch.events_of(folder)}
    assert "2 consecutive steps" in events["error"]["reason"]
    accounting = launch.time_accounting_of(folder)
    assert events["time_accounting"]["lost_s"] == accounting["lost_s"] > 0
    drawn = EventAccumulator(str(folder / "tb"))
    drawn.Reload()
    assert "train_events/error/reason/text_summary" in drawn.Tags()["tensors"]
    (lost,) = drawn.Scalars("train_events/time_accounting/lost_s")
    assert math.isclose(lost.value, accounting["lost_s"], rel_tol=1e-5)
