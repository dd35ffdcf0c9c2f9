"""Fine-tuning on conversations, and the guide to it: its commands, unchanged, with a small
model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.docs_commands import Page, blocks, copy_tree
from tests.end_to_end.test_extending import write_files
from tests.harness import launch
from tests.harness.hugging_face import add_tokenizer, make_folder, tensors_of, update_config
from torchtitan_lite.cli import main

GUIDE = "docs/guides/fine_tuning.md"


@pytest.mark.matrix
def test_the_config_learns_conversations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = [
        "--config=configs/llama3_sft_debug.toml",
        f"--job.dump_folder={folder}",
        f"--training.cache_folder={tmp_path / 'cache'}",
        "--training.steps=8",
        "--validation.freq=8",
        "--validation.sample_tokens=8",
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


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_the_guide_from_a_folder_to_a_chat_in_transformers(tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", "llama"))
    # As the tokenizer has them.
    special = {"bos_token_id": 0, "eos_token_id": 1}
    update_config(folder, **special)
    (folder / "generation_config.json").write_text(json.dumps(special))
    tree = tmp_path / "tree"
    copy_tree(tree)
    page = Page(tree, {"HF_DIR": str(folder)})
    for block in blocks(GUIDE):
        page.run(block, [])
    output = page.output
    (targets,) = set(re.findall(r"tokens \(([\d,]+) of them targets\) in", output))
    assert int(targets.replace(",", "")) > 500
    assert f"Initial weights loaded from {folder}\n" in output
    assert "Adapters have 26,624 of 124,112 parameters" in output
    assert len(re.findall(r"^validation  step \d+  loss", output, re.MULTILINE)) == 4
    losses = [float(loss) for loss in re.findall(r"^loss +(\d+\.\d+) nats", output, re.MULTILINE)]
    assert len(losses) == 3 and max(losses[1:]) < losses[0]
    before = tensors_of(folder)
    for exported in ("outputs/chat/hf", "outputs/chat_lora/hf"):
        after = tensors_of(tree / exported)
        assert before.keys() == after.keys()
        assert any(not before[name].bfloat16().equal(after[name]) for name in before)
    (ours,) = json.loads((tree / "answer.json").read_text())
    write_files("guides/fine_tuning.md", tree)
    theirs = subprocess.run(
        [sys.executable, "chat.py"], cwd=tree, capture_output=True, text=True, check=True
    )
    assert theirs.stdout == ours["text"] + "\n" and ours["ids"]
