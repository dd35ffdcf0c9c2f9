"""The estimate of the configured mesh: extrapolated traces equal complete ones."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite import cli
from torchtitan_lite.cli.parsers import DEVICES
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.device import ACCELERATORS
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.tools.estimate import Estimate, as_values, estimate, memory_picture, text
from torchtitan_lite.tools.estimate.extrapolation import RankStep
from torchtitan_lite.tools.estimate.memory import KINDS, Kind
from torchtitan_lite.tools.estimate.work import Work, collective_seconds
from torchtitan_lite.training.run_config import config_from

PP4 = {"parallelism.pipeline_parallel_degree": 4}


def _config(num_layers: int, **overrides: Any) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {
            "flavor": "small",
            "dims": {
                "dim": 128,
                "num_layers": num_layers,
                "num_heads": 4,
                "num_kv_heads": 2,
                "hidden_dim": 384,
                "vocab_size": 2048,
            },
        },
        "training": {"seq_len": 128, "local_batch_size": 2, "global_batch_size": 32},
        "activation_checkpoint": {"mode": "none"},
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return config_from(values, "the test")


@functools.cache
def _plain() -> Estimate:
    """The configuration with 6 layers on two ranks: several tests read it."""
    return estimate(_config(6), 2, "h200", search=False)


_MUON = _config(
    7,
    **{
        "optimizer.name": "Muon",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
)


@functools.cache
def _with_muon() -> Estimate:
    return estimate(_MUON, 4, "h200", search=False)


@pytest.mark.matrix
def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    adapted = estimate(_config(6, **{"model.converters": ["lora"]}), 1, "cpu")
    num_parameters = _plain().num_parameters
    num_bytes = 4 * (adapted.num_parameters - num_parameters)
    assert 0 < num_bytes < 4 * num_parameters / 10
    assert adapted.time is None and adapted.fits is None and adapted.search is None

    def most(kind: Kind) -> float:
        return max(point.bytes[kind] for point in adapted.ranks[0].points)

    assert most("weights") == 4 * adapted.num_parameters
    assert most("optimizer") == pytest.approx(2 * num_bytes, rel=0.01)
    assert most("gradients") == pytest.approx(num_bytes, rel=0.01)
    assert adapted.checkpoint_bytes == pytest.approx(3 * num_bytes, rel=0.01)


def _check_few_blocks(few: Estimate, whole: Estimate) -> None:
    for one, other in zip(few.ranks, whole.ranks, strict=True):
        assert len(one.traced_blocks) == 2
        assert len(other.traced_blocks) == 1
        # The inputs of the microbatches that a shallower pipeline does not have.
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)
        assert one.num_parameters == other.num_parameters
        assert one.schedule.flops == pytest.approx(other.schedule.flops)
        assert one.update.flops == pytest.approx(other.update.flops)
    for axis, traffic in whole.traffic.items():
        assert few.traffic[axis].num_bytes == pytest.approx(traffic.num_bytes, rel=1e-3)


@pytest.mark.matrix
def test_few_blocks_predict_all() -> None:
    """FSDP, two kinds of optimizer, and recomputation of every second block."""
    whole = estimate(_MUON, 4, "h200", search=False, extrapolate=False)
    _check_few_blocks(_with_muon(), whole)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world_size", "num_layers", "overrides"),
    [(4, 8, {}), (4, 8, {"activation_checkpoint.mode": "full"}), (8, 30, PP4)],
    ids=["fsdp", "recompute", "pipeline"],
)
def test_few_blocks_of_each_technique_predict_all(
    world_size: int, num_layers: int, overrides: dict[str, Any]
) -> None:
    config = _config(num_layers, **overrides)
    few = estimate(config, world_size, "cpu")
    _check_few_blocks(few, estimate(config, world_size, "cpu", extrapolate=False))


@pytest.mark.matrix
def test_weights_and_optimizer_are_those_of_the_shards() -> None:
    found = _plain()
    (rank,) = found.ranks
    assert found.num_parameters == 2 * rank.num_parameters
    assert rank.peak.bytes["weights"] == 4 * rank.num_parameters
    # AdamW: two moments, and a count per parameter.
    assert rank.peak.bytes["optimizer"] == pytest.approx(8 * rank.num_parameters, rel=0.01)
    assert found.checkpoint_bytes == 12 * found.num_parameters


@pytest.mark.matrix
def test_muon_has_one_slot_per_matrix_and_shares_the_iterations() -> None:
    found = _with_muon()
    num_layers = 7
    dim, width, vocabulary = 128, 384, 2048
    shapes = [(dim, dim), (dim // 2, dim), (dim // 2, dim), (dim, dim)]
    shapes += [(width, dim), (dim, width), (width, dim)]
    matrices = num_layers * sum(rows * columns for rows, columns in shapes)
    norms = (2 * num_layers + 1) * dim
    assert found.num_parameters == matrices + 2 * vocabulary * dim + norms
    slots = matrices + 2 * (found.num_parameters - matrices)
    assert found.checkpoint_bytes == 4 * (found.num_parameters + slots)
    iteration = NewtonSchulz(steps=5, dtype=torch.bfloat16)
    flops = num_layers * sum(iteration.flops(shape) for shape in shapes)
    (rank,) = found.ranks
    assert rank.update.flops == pytest.approx(flops / 4)
    # To the owner and back in bfloat16, but for the quarter that it has.
    assert found.traffic["owners"].num_bytes == pytest.approx(2 * 2 * matrices * 3 / 4 / 4)


@pytest.mark.matrix
def test_flops_without_recomputation_are_those_of_the_model() -> None:
    found = _plain()
    assert found.time is not None
    # Matrix products and attention are counted; the formula has nothing else.
    model_flops = found.time.mfu * found.time.step_s * ACCELERATORS["h200"].peak_flops
    assert found.flops == pytest.approx(model_flops, rel=0.05)


@pytest.mark.matrix
def test_recomputation_costs_flops_and_saves_memory() -> None:
    plain = _plain()
    recomputed = estimate(
        _config(6, **{"activation_checkpoint.mode": "full"}), 2, "h200", search=False
    )
    assert recomputed.flops > 1.2 * plain.flops
    assert recomputed.fullest.peak.bytes["activations"] < plain.fullest.peak.bytes["activations"]


def test_an_invalid_mesh_is_rejected() -> None:
    with pytest.raises(ConfigError, match="global_batch_size"):
        estimate(_config(4), 24, "h200")


def test_work_is_linear() -> None:
    one = Work(flops=2.0, matmul_s=1.0, other_s=3.0)
    assert one + one == one * 2
    assert (one * 3 - one).compute_s == 8.0


def test_a_collective_between_nodes_takes_longer() -> None:
    h200 = ACCELERATORS["h200"]
    near = collective_seconds("all_gather", 1e9, 8, 8, h200)
    far = collective_seconds("all_gather", 1e9, 8, 1, h200)
    assert collective_seconds("all_gather", 1e9, 1, 1, h200) == 0
    # 7/8 of the bytes at the bandwidth of the link.
    assert near == pytest.approx(7 / 8 * 1e9 / 450e9, rel=0.05)
    assert far > 5 * near
    assert collective_seconds("all_reduce", 1e9, 8, 8, h200) == pytest.approx(2 * near, rel=0.05)


def test_the_command_names_the_devices() -> None:
    assert set(DEVICES) == {*ACCELERATORS, "cpu"}


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\nflavor = "debugmodel"\n[training]\nseq_len = 256\n')
    picture, values = tmp_path / "memory.svg", tmp_path / "estimate.json"
    arguments = ["estimate", "--config", str(config), "--world-size", "2", "--no-search"]
    status = cli.main([*arguments, "--memory-plot", str(picture), "--json", str(values)])
    assert status == 0
    printed = capsys.readouterr().out
    assert "Predicted, not measured" in printed and "Assumptions:" in printed
    assert picture.read_text().count("<polygon") == len(KINDS)
    written = json.loads(values.read_text())
    assert written["world_size"] == 2
    assert written["best_meshes"] is None and "Traced meshes" not in printed


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_layers_and_stages_are_those_of_the_model(schedule: str) -> None:
    pipeline = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "activation_checkpoint.mode": "full",
        "training.global_batch_size": 4,
    }
    found = estimate(_config(14, **pipeline), 2, "cpu")
    first, last = found.ranks

    def layers(rank: RankStep) -> list[int]:
        units = {point.unit for point in rank.points if point.unit.startswith("layer ")}
        return sorted(int(unit.removeprefix("layer ")) for unit in units)

    if schedule == "1F1B":
        assert all(len(rank.traced_blocks) == 2 for rank in found.ranks)
        assert (first.stages, last.stages, first.num_stages) == ((0,), (1,), 2)
        assert (layers(first), layers(last)) == ([0, 6], [7, 13])
        assert "(stage 2 of 2)" in text(found)
    else:
        assert (first.stages, last.stages, first.num_stages) == ((0, 2), (1, 3), 4)
        assert (layers(first)[0], layers(last)[-1]) == (0, 13)
        assert "(stages 2 and 4 of 4)" in text(found)
    assert "of part" not in text(found) + json.dumps(as_values(found))


@pytest.mark.matrix
@pytest.mark.parametrize("extrapolate", [True, False])
def test_forward_and_backward_run_through_the_layers_of_the_model(extrapolate: bool) -> None:
    found = _plain() if extrapolate else estimate(_config(6), 1, "cpu", extrapolate=False)
    (rank,) = found.ranks
    for phase, ends in (("forward", ("layer 0", "layer 5")), ("backward", ("layer 5", "layer 0"))):
        units = [point.unit for point in rank.points if point.phase == phase]
        layers = [unit for unit in units if unit.startswith("layer ")]
        assert (layers[0], layers[-1]) == ends


def test_text_and_values_name_every_kind() -> None:
    found = _plain()
    assert all(kind in text(found) and f">{kind}<" in memory_picture(found) for kind in KINDS)
    assert set(as_values(found)["ranks"][0]["peak_bytes_by_kind"]) == set(KINDS)


@pytest.mark.matrix
def test_memory_estimation_replaces_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text("[memory_estimation]\nenable = true\n[training]\nseq_len = 256\n")
    assert cli.main(["train", "--config", str(config)]) == 0
    assert "Predicted, not measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [config]
