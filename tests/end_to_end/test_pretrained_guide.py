"""The guide to pretrained weights: its commands, unchanged, with a small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.docs_commands import ROOT, Page, blocks, copy_tree
from tests.harness.hugging_face import add_tokenizer, make_folder, tensors_of
from tests.harness.launch import SMALL, run
from tests.harness.ranks import WorkerPool
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.training.final_export import export_last_save
from torchtitan_lite.training.run_config import load_config

GUIDE = "docs/pretrained_weights.md"


def test_both_guides_have_the_same_commands_and_headings() -> None:
    chinese = "docs/pretrained_weights.zh-CN.md"
    assert blocks(GUIDE) == blocks(chinese)
    for mark in ("#", "|", "- **"):
        lines = [
            sum(line.startswith(mark) for line in (ROOT / guide).read_text().splitlines())
            for guide in (GUIDE, chinese)
        ]
        assert lines[0] == lines[1] > 0


@pytest.mark.timeout(600)
@pytest.mark.matrix
def test_the_guide_from_a_folder_to_an_exported_model(tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", "llama"))
    out = tmp_path / "out"
    copy_tree(tmp_path / "tree")
    page = Page(tmp_path / "tree", {"HF_DIR": str(folder), "OUT": str(out)})
    for block in blocks(GUIDE):
        page.run(block, [])
    output = page.output
    # It starts from the folder, then resumes from its own checkpoint on another mesh.
    assert f"Initial weights loaded from {folder}\n" in output, output[-6000:]
    assert f"Resumed from {out}/run/checkpoint/step-2 at step 2" in output, output[-6000:]
    assert f"Initial weights loaded from {out}/converted/step-0\n" in output, output[-6000:]
    assert "perplexity" in output
    before, after = tensors_of(folder), tensors_of(out / "exported")
    assert before.keys() == after.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert any(not torch.equal(before[n].bfloat16(), after[n]) for n in before)
    model: Any = AutoModelForCausalLM.from_pretrained(out / "exported")
    tokenizer = AutoTokenizer.from_pretrained(out / "exported")
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] > 4


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_transformers_reads_the_last_export(
    ranks: int, tmp_path: Path, pools: Callable[[int], WorkerPool]
) -> None:
    arguments = [
        *SMALL,
        "--checkpoint.enable=true",
        "--checkpoint.last_save_in_hf=true",
        "--checkpoint.export_dtype=bfloat16",
        "--checkpoint.export_file_gb=0.001",
        f"--job.dump_folder={tmp_path}/run",
        "--training.steps=2",
    ]
    run(ranks, arguments, tmp_path / "log")
    exported = tmp_path / "run" / "hf" / "step-2"
    assert len(list(exported.glob("*.safetensors"))) > 2
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.bfloat16
    # The tokenizer was trained on the corpus.
    ours = load_tokenizer(exported)
    text = "def main() -> None:"
    assert (
        AutoTokenizer.from_pretrained(exported)(text).input_ids[-6:]
        == (ours.encode_batch([text])[0][-6:])
    )
    assert (model.config.bos_token_id, model.config.eos_token_id) == (ours.bos_id, ours.eos_id)
    # If several replicas finish together, the second finds the export done.
    config = load_config(tmp_path / "run" / "config.toml")
    pools(1).run(export_last_save, config, str(tmp_path / "run" / "checkpoint"), exported)
