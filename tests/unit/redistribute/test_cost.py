"""The cost model of a machine: its file, its predictions, and how it is fitted."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from scripts.calibration import (
    TimedStep,
    calibration_steps,
    fit,
    fraction_misordered,
    fraction_within,
    held_out_steps,
    predicted_s,
)
from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.cost import CPU, CUDA, Costs, Link
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.placements import HolderMesh
from torchtitan_lite.redistribute.plan import plan

MACHINE = Costs(
    round_s=2e-4,
    collective_s=1e-4,
    piece_s=4e-5,
    copy_bytes_per_s=8e9,
    within=Link(latency_s=3e-5, bytes_per_s=3e9),
    between=CPU.between,
    collective_within=Link(latency_s=7e-5, bytes_per_s=5e8),
    cores=2.0,
)
"""A model with figures that differ from the default ones."""


def seconds(num_rows: int, costs: Costs = CPU, size: int = 4) -> float:
    """Return the predicted time to gather a tensor."""
    mesh = HolderMesh.ranks(size)
    src, dst = Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()])
    shape = (num_rows, 1024)
    return plan(src, dst, shape, torch.float32, costs=costs).predicted_s


def test_a_saved_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for costs in (CPU, CUDA, MACHINE.with_ranks_per_node(8)):
        costs.save(path)
        assert Costs.load(path) == costs
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


def test_a_file_without_cores_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    figures = asdict(CPU)
    del figures["cores"]
    path.write_text(json.dumps(figures))
    assert Costs.load(path) == CPU


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"piece_s": -1.0}, "piece_s"),
        ({"piece_s": "fast"}, "piece_s"),
        ({"within": {"latency_s": 1e-6, "bytes_per_s": 0.0}}, "within.bytes_per_s"),
        ({"speed": 1.0}, "speed"),
        ({"cores": 0.0}, "cores"),
    ],
)
def test_an_error_names_file_and_key(change: dict[str, object], key: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(CPU) | change))
    with pytest.raises(LayoutError, match=f"(?s){path} holds no costs: .*{key}.*calibrate"):
        Costs.load(path)


def test_an_error_names_a_missing_key_and_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(LayoutError, match=f"{path} holds no costs: .*No such file"):
        Costs.load(path)
    path.write_text("{}")
    with pytest.raises(LayoutError, match="round_s"):
        Costs.load(path)


@pytest.mark.parametrize("costs", [CPU, CUDA, MACHINE])
def test_more_bytes_cost_more(costs: Costs) -> None:
    predicted = [seconds(rows, costs) for rows in (64, 256, 1024, 4096)]
    assert predicted == sorted(predicted) and len(set(predicted)) == 4


def test_ranks_share_few_cores() -> None:
    alone, few = seconds(4096), seconds(4096, replace(CPU, cores=1.0))
    # All 4 ranks are equally busy.
    assert few == pytest.approx(4 * alone)
    assert seconds(4096, replace(CPU, cores=4.0)) == pytest.approx(alone)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_fit_recovers_the_figures_behind_the_times(num_ranks: int) -> None:
    samples = [
        TimedStep(name="", step=step, seconds=predicted_s(step, MACHINE))
        for step in calibration_steps(num_ranks)
    ]
    actual = fit(samples, replace(CPU, cores=MACHINE.cores))
    others = [
        TimedStep(name="", step=step, seconds=predicted_s(step, MACHINE))
        for step in held_out_steps(num_ranks, 30)
    ]
    assert fraction_within(others, actual, 1.1) == 1.0
    assert fraction_misordered(others, actual) == 0.0
    # With two ranks, rounds and messages cannot be distinguished.
    if num_ranks > 3:
        assert actual.piece_s == pytest.approx(MACHINE.piece_s, rel=0.2)
        assert actual.within.bytes_per_s == pytest.approx(MACHINE.within.bytes_per_s, rel=0.05)
        assert actual.copy_bytes_per_s == pytest.approx(MACHINE.copy_bytes_per_s, rel=0.05)
    # Figures without a measurement stay.
    assert actual.between == CPU.between


def test_distribution_of_errors() -> None:
    steps = held_out_steps(4, 12)
    right = [TimedStep(name="", step=s, seconds=predicted_s(s, MACHINE)) for s in steps]
    assert fraction_within(right, MACHINE) == 1.0 and fraction_misordered(right, MACHINE) == 0.0
    slower = [replace(sample, seconds=3 * sample.seconds) for sample in right]
    assert fraction_within(slower, MACHINE) == 0.0 and fraction_misordered(slower, MACHINE) == 0.0
    turned = [replace(sample, seconds=1 / sample.seconds) for sample in right]
    assert fraction_misordered(turned, MACHINE) == 1.0
