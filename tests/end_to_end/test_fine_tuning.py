"""Fine-tuning on conversations."""

import re
from pathlib import Path

from tests import launch


def test_the_config_learns_conversations(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        "--config=configs/llama3_sft_debug.toml",
        f"--job.dump_folder={folder}",
        f"--training.cache_folder={tmp_path / 'cache'}",
        "--training.steps=8",
        "--validation.freq=8",
        "--lr_scheduler.warmup_steps=1",
        "--job.device=cpu",
    ]
    text = launch.run(1, arguments, tmp_path / "log")
    tokens, targets = re.findall(r"([\d,]+) tokens \(([\d,]+) of them targets\)", text)[0]
    assert 0 < int(targets.replace(",", "")) < 0.6 * int(tokens.replace(",", ""))
    assert re.search(r"validation +step 8 +loss \d", text)
    losses = [line["loss"] for line in launch.steps_of(folder)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
