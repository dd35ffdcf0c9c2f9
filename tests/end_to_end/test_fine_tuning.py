"""Fine-tuning on conversations."""

import json
import re
from pathlib import Path

import pytest

from tests import launch
from torchtitan_lite.cli import main


def test_the_config_learns_conversations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    assert "    user: What does a lighthouse do?\n    assistant:" in text

    ask = ["--prompt", "What does a lighthouse do?", "--device=cpu", "--temperature=0"]
    for chat in ([], ["--chat"], ["--chat", "--system", "Be short."]):
        path = tmp_path / "texts.json"
        assert main(["generate", str(folder), *ask, *chat, f"--json={path}"]) == 0
        (answer,) = json.loads(path.read_text())
        # Only a continuation shows its beginning.
        assert capfd.readouterr().out.startswith(answer["text"] if chat else ask[1])
