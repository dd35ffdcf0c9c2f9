"""The first steps of a user: train the debug config on two ranks, look at the outputs, resume on
one."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import run_command


@pytest.mark.matrix
def test_debug_config_trains_prints_a_sample_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        "--config=configs/llama3_debug.toml",
        f"--job.dump_folder={folder}",
        f"--training.dataset_path={launch.FIXTURE}",
        "--training.held_out_fraction=0.2",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
        "--training.steps=6",
        "--training.seq_len=64",
        "--lr_scheduler.warmup_steps=1",
        "--validation.freq=3",
        "--validation.steps=2",
        "--validation.sample_tokens=20",
        "--checkpoint.interval=4",
    ]
    command = ("-m", "torchtitan_lite", "train", "--nproc=2")
    text = launch.run(1, arguments, tmp_path / "log", program=command)
    assert re.search(r"step 6/6 .*loss \d", text)
    assert re.search(r"validation +step 3 +loss \d", text)
    assert re.search(r"Goodput +\d+\.\d% of \d+:\d\d since the first start", text)
    events = launch.events_of(folder)
    assert [e["step"] for e in events if e["event"] == "time_accounting"] == [4, 6]
    (start,) = [e for e in events if e["event"] == "start"]
    assert (start["step"], start["ranks"], start["device"]) == (0, 2, "cpu")
    assert start["parameters"] > 10**6 and 0 < start["process_age_s"] < 600
    durable = [e["checkpoint_step"] for e in launch.events_of(folder) if e["event"] == "saved"]
    assert durable == sorted(durable) and (durable[0], durable[-1]) == (1, 6)
    accounting = launch.time_accounting_of(folder)
    sample = text.split("A sample of the model:")[1].split("Outputs")[0]
    assert len(sample.strip()) > 20
    steps = launch.steps_of(folder)
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert steps[-1]["loss"] < steps[0]["loss"]
    times = [line["time"] for line in steps]
    assert times == sorted(times) and time.time() - 600 < times[0] < times[-1] < time.time()
    assert steps[-1]["tokens"] == 6 * 4 * 64
    saved = {path.name for path in (folder / "checkpoint").iterdir()}
    # The tokenizer is stored next to the checkpoints.
    saved.remove("assets")
    # On a loaded machine, the second save waits until the first is written.
    assert saved in ({"step-1", second, "step-6"} for second in ("step-4", "step-5", "step-6"))
    assert list((folder / "tb").glob("events.*"))
    assert "steps = 6" in (folder / "config.toml").read_text()

    (resume,) = re.findall(r"^Resume +(.+)$", text, re.MULTILINE)
    words = shlex.split(resume)
    assert words[0].endswith("torchtitan-lite") and words[1:4] == ["train", "--nproc", "2"]
    again = launch.run(1, words[4:], tmp_path / "again.log")
    assert f"Resumed from {folder}/checkpoint/step-6" in again
    assert launch.steps_of(folder)[-1]["step"] == 12
    went_on = launch.time_accounting_of(folder)
    assert went_on["first_start_ns"] == accounting["first_start_ns"]
    assert went_on["start_s"] > accounting["start_s"] and went_on["idle_s"] > 0


def test_one_process_without_torchrun(tmp_path: Path) -> None:
    arguments = [*launch.SMALL, f"--job.dump_folder={tmp_path / 'run'}", "--training.steps=2"]
    text = run_command("train", *arguments)
    assert "A sample of the model" in text
    manifest = tmp_path / "run" / "checkpoint" / "step-2" / "manifest.json"
    assert json.loads(manifest.read_text())["mesh"] == {
        "pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1,
    }  # fmt: skip
