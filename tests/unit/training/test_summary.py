"""What a run prints at its start: of its model and of where its state comes from."""

import io
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.jobs import mesh_for, odd_config, run_job
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.nn.spec import ModelCost
from torchtitan_lite.training.builders import build, spec_on_device
from torchtitan_lite.training.builders.model import with_counted_parameters
from torchtitan_lite.training.summary import print_end, start_rows

Pools = Callable[[int], WorkerPool]
SAVING = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled", "training.steps": 1}


def rows(folder: Path, overrides: dict[str, Any]) -> dict[str, str]:
    """Return what this worker would print at the start of a run."""
    config = odd_config(folder, overrides)
    with build(config, mesh_for(config), StopRequest()) as built:
        return start_rows(built, config)


def test_the_state_is_said_where_it_comes_from(pools: Pools, tmp_path: Path) -> None:
    def state(name: str, overrides: dict[str, Any]) -> str:
        return pools(1).run(rows, tmp_path / name, overrides)[0]["State"]

    assert state("new", {}) == "new, with initial weights drawn from the seed"
    pools(1).run(run_job, tmp_path / "base", SAVING)
    base = str(tmp_path / "base" / "checkpoint" / "step-1")
    assert state("base", SAVING).startswith("resumed from ")
    pretrained = {**SAVING, "checkpoint.initial_load_path": base}
    assert state("fine", pretrained) == f"new, with initial weights from {base}"
    lora = {**pretrained, "model.converters": ["lora"]}
    frozen = f"beside the frozen weights of {base}"
    assert state("lora", lora) == f"new, with adapters drawn from the seed {frozen}"
    pools(1).run(run_job, tmp_path / "lora", lora)
    resumed = state("lora", lora)
    assert resumed.startswith("resumed from ") and resumed.endswith(frozen)


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        *(("llama3", flavor) for flavor in ("odd", "odd_tied")),
        *(("qwen3", flavor) for flavor in ("odd", "many_experts")),
        *((name, "odd") for name in ("deepseek_v3", "gpt_oss", "llama4", "qwen3_next")),
    ],
)
def test_parameters_are_those_of_the_module(name: str, flavor: str, tmp_path: Path) -> None:
    config = odd_config(tmp_path, {"model.name": name, "model.flavor": flavor})
    spec = spec_on_device(config, detect_device("cpu"))
    # A family that states them right.
    assert with_counted_parameters(spec, config) is spec

    wrong = ModelCost(num_params=0, num_active_params=0, flops_per_token=6)
    counted = with_counted_parameters(replace(spec, cost=lambda seq_len: wrong), config).cost(8)
    true = spec.cost(8)
    assert (counted.num_params, counted.num_active_params) == (true.num_params, true.num_params)
    assert counted.flops_per_token == 6


CHAT = {
    "training.dataset_path": "tests/assets/chat.jsonl",
    "training.messages_column": "messages",
    "training.steps": 1,
}


def end(folder: Path, overrides: dict[str, Any], has_template: bool = True) -> str:
    """Return what this worker prints and logs at the end of a finished run."""
    config = odd_config(folder, overrides)
    printed, handler = io.StringIO(), logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        with build(config, mesh_for(config), StopRequest()) as built, redirect_stdout(printed):
            if not has_template:
                (built.data.tokenizer_files.folder / "chat_template.jinja").unlink()
            print_end(built, config, ["--config", "c.toml"], finished=True)
    finally:
        logger.removeHandler(handler)
    return printed.getvalue() + handler.stream.getvalue()


def test_the_sample_of_a_fine_tuning_answers_a_question_of_its_data(
    pools: Pools, tmp_path: Path
) -> None:
    (text,) = pools(1).run(end, tmp_path / "chat", CHAT | {"validation.sample_tokens": 3})
    sample = text.partition("A sample of the model:")[2].partition("Outputs")[0].strip()
    question, answer = sample.splitlines()[:2]
    assert question == "user: What does a lighthouse do?"
    assert answer.strip().startswith("assistant:")
    # 80 tokens have 200 characters.
    assert len(sample) < 100


def test_a_finished_run_ends_well_without_its_sample(pools: Pools, tmp_path: Path) -> None:
    # A folder of its own, because the template is removed.
    overrides = CHAT | {"training.cache_folder": str(tmp_path / "cache")}
    (text,) = pools(1).run(end, tmp_path / "chat", overrides, False)
    assert "No sample of the model: CheckpointError: the tokenizer in" in text
    assert "A sample" not in text and "Outputs" in text


def test_a_finished_run_resumes_with_twice_the_steps_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchtitan_lite.training.summary._sample_lines", lambda *given: [])
    monkeypatch.delenv("TORCHTITAN_LITE_LAUNCHER_PID", raising=False)
    job = SimpleNamespace(
        state=SimpleNamespace(step=14),
        steps=10,
        checkpoints=SimpleNamespace(root=tmp_path),
        mesh=SimpleNamespace(world_size=1, is_leader=True),
    )
    built: Any = SimpleNamespace(job=job)
    config = odd_config(tmp_path / "a" / "b", {"checkpoint.enable": True})
    print_end(built, config, ["train", "--training.steps=10"], finished=True)
    (resume,) = [line for line in capsys.readouterr().out.splitlines() if "Resume" in line]
    assert "28" in resume and "20" not in resume
