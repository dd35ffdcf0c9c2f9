"""The moving average of the weights: the same on every mesh, resumed on another one, evaluated and
exported by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.harness.tolerances import PARITY_FLOAT64
from tests.parity.meshes import EXPERT_MESHES, EXPERTS, MESHES
from tests.parity.test_inference import RUN, record
from torchtitan_lite.cli import main

Pools = Callable[[int], WorkerPool]

DECAY = 0.7
EMA = {"optimizer.ema_decay": DECAY, "training.local_batch_size": 2}
TIED = {"model.flavor": "odd_tied"}
SAVING = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled"}


def expected_averages(
    pools: Pools, folder: Path, shared: dict[str, Any], steps: int
) -> dict[str, torch.Tensor]:
    """The averages from the weights of shorter runs without an average."""
    whole = {**shared, "training.local_batch_size": 8}
    frozen = {**whole, "optimizer.lr": 0.0, "training.steps": 1}
    (start,) = pools(1).run(run_job, folder / "0", frozen)
    averages = start.weights
    for step in range(1, steps + 1):
        (run,) = pools(1).run(run_job, folder / str(step), {**whole, "training.steps": step})
        averages = {
            name: DECAY * average + (1 - DECAY) * run.weights[name]
            for name, average in averages.items()
        }
    return averages


def check(outcome: Outcome, expected: dict[str, torch.Tensor]) -> None:
    found = {
        name.removeprefix("optimizer.").removesuffix(".ema"): tensor
        for name, tensor in outcome.state.items()
        if name.endswith(".ema")
    }
    # Routers have a bias that is no parameter.
    assert found.keys() == {name for name in expected if not name.endswith("_X")}
    for name, average in found.items():
        weight = outcome.weights[name]
        torch.testing.assert_close(average, expected[name], rtol=PARITY_FLOAT64, atol=1e-12)
        assert not torch.equal(average, weight), name


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "shared"),
    [
        ("ep-2-fsdp-4", {**EXPERTS, "optimizer.name": "Muon", "optimizer.muon_dtype": "float64"}),
        ("fsdp-2-tp-2", {}),
        ("pp-2-fsdp-2", TIED),
        ("cpu-offload", {}),
        ("hsdp-2x2-ep-2", EXPERTS),
    ],
)
def test_the_average_is_that_of_one_process(
    mesh: str, shared: dict[str, Any], pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = {**MESHES, **EXPERT_MESHES}[mesh]
    expected = expected_averages(pools, tmp_path, shared, steps=2)
    outcomes = pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared, **EMA})
    check(outcomes[0], expected)


@pytest.mark.matrix
def test_the_average_is_resumed_evaluated_and_exported_by_name(
    pools: Pools, tmp_path: Path
) -> None:
    """Saved on one mesh, resumed on another, evaluated on a third."""
    folder = tmp_path / "run"
    settings = {**RUN, **EMA, **SAVING}
    expected = expected_averages(pools, tmp_path / "expected", RUN_WITHOUT_SAVES, steps=2)
    size, overrides = MESHES["tp-2"]
    pools(size).run(run_job, folder, {**settings, **overrides, "training.steps": 1})
    (outcome, _) = pools(2).run(run_job, folder, {**settings, "training.steps": 2})
    assert outcome.resumed_at == 1
    check(outcome, expected)
    step = folder / "checkpoint" / "step-2"
    (plain,) = pools(1).run(record, folder, {})
    (averaged,) = pools(1).run(record, folder, {}, ("--ema",))
    assert averaged["loss"] != plain["loss"]
    for found in pools(2).run(record, folder, {}, ("--ema",)):
        assert found["loss"] == pytest.approx(averaged["loss"], rel=PARITY_FLOAT64)
    exported = tmp_path / "exported"
    assert main(["convert", "to-hf", str(step), str(exported), "--ema", "--workers=1"]) == 0
    tensors = load_file(exported / "model.safetensors")
    assert torch.equal(tensors["model.norm.weight"], outcome.state["optimizer.norm.weight.ema"])
    assert main(["convert", "to-hf", str(step), str(tmp_path / "plain"), "--workers=1"]) == 0
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(tensors["model.norm.weight"], outcome.weights["norm.weight"])


def test_an_average_begins_at_the_weights_of_a_checkpoint_without_one(
    pools: Pools, tmp_path: Path
) -> None:
    settings = {**SAVING, "training.local_batch_size": 2}
    (first,) = pools(1).run(run_job, tmp_path / "run", {**settings, "training.steps": 1})
    assert not any(name.endswith(".ema") for name in first.state)
    (second,) = pools(1).run(run_job, tmp_path / "run", {**settings, **EMA, "training.steps": 2})
    assert second.resumed_at == 1
    expected = {
        name: DECAY * weight + (1 - DECAY) * second.weights[name]
        for name, weight in first.weights.items()
    }
    check(second, expected)


RUN_WITHOUT_SAVES = {
    key: value for key, value in RUN.items() if not key.startswith(("checkpoint", "training.steps"))
}


def test_weights_without_an_average_are_named(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    pools(1).run(run_job, folder, {**RUN, **SAVING})
    step = folder / "checkpoint" / "step-2"
    assert main(["convert", "to-hf", str(step), str(tmp_path / "exported"), "--ema"]) == 1
    problem = "has no moving average of the weights: its run had optimizer.ema_decay = 0."
    assert problem in capsys.readouterr().err
