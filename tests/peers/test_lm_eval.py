"""`evaluate` against lm-eval's loglikelihood_rolling, on many documents of different lengths."""

import json
from pathlib import Path

import pytest

from tests.harness import tolerances
from tests.harness.hugging_face import add_tokenizer, make_folder
from tests.harness.jobs import FIXTURE
from tests.harness.ranks import run_command
from tests.peers.environments import run_script

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
SEQ_LEN = 48


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_document_losses_equal_those_of_lm_eval(family: str, tmp_path: Path) -> None:
    model = add_tokenizer(make_folder(tmp_path / "hf", family))
    texts = [json.loads(line)["text"] for line in FIXTURE.read_text().splitlines()[:12]]
    # From one character to many windows; two documents end exactly at the end of a window.
    texts += ["a", texts[0][:40], texts[1][:150], texts[2][:333]]
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    theirs = run_script(
        "lm-eval",
        ("lm-eval[hf]==0.4.13",),
        "lm_eval_rolling.py",
        tmp_path,
        model,
        documents,
        SEQ_LEN,
    )
    out = tmp_path / "loss.json"
    arguments = (
        f"--dataset-path={documents}",
        f"--seq-len={SEQ_LEN}",
        "--batch-size=1",
        "--device=cpu",
        f"--json={out}",
        f"--training.cache_folder={tmp_path}/cache",
    )
    run_command("evaluate", str(model), *arguments)
    ours = json.loads(out.read_text())
    assert ours["tokens"] == theirs["tokens"]
    expected = -sum(theirs["log_likelihoods"]) / theirs["tokens"]
    assert ours["loss"] == pytest.approx(expected, rel=tolerances.PARITY_FLOAT32_LOSS)
