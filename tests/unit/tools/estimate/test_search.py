"""The search for the best mesh: it compares traced meshes, and its result is its own result."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.estimate.test_estimate import _config
from torchtitan_lite.config import Config
from torchtitan_lite.distributed.device import ACCELERATORS
from torchtitan_lite.distributed.mesh import ParallelDims, resolve_degrees
from torchtitan_lite.tools.estimate import Estimate, as_values, estimate, text
from torchtitan_lite.tools.estimate.extrapolation import Point, RankStep
from torchtitan_lite.tools.estimate.memory import KINDS
from torchtitan_lite.tools.estimate.mesh_step import MeshStep, TimeEstimate, trace_mesh
from torchtitan_lite.tools.estimate.meshes import MeshModel, sizes_of, with_degrees
from torchtitan_lite.tools.estimate.search import (
    MAX_TRACED_LAYERS,
    MAX_TRACES,
    MeshSearch,
    search_meshes,
)
from torchtitan_lite.tools.estimate.text import overrides
from torchtitan_lite.tools.estimate.work import Work
from torchtitan_lite.training.run_config import config_from, parse_command_line
from torchtitan_lite.training.trained_model import trained_spec

H200 = ACCELERATORS["h200"]
GIB = 2**30


def _model(config: Config) -> MeshModel:
    spec = trained_spec(config)
    return MeshModel(config, spec, sizes_of(config, spec), H200)


def _traced(config: Config, degrees: ParallelDims) -> MeshStep:
    return trace_mesh(with_degrees(config, degrees), trained_spec(config), degrees, H200)


def _perturbed(model: MeshModel, seed: int) -> Callable[[ParallelDims], MeshStep]:
    """Return a trace that differs from the unfitted `model` by up to a factor of 4."""

    def trace(degrees: ParallelDims) -> MeshStep:
        draw = random.Random(f"{seed} {degrees}").uniform
        predicted = model.predict(degrees)
        num_bytes = predicted.peak_bytes * draw(0.5, 2)
        tokens_per_s = predicted.tokens_per_s * draw(0.5, 2)
        return _step(degrees, num_bytes, tokens_per_s)

    return trace


def _step(degrees: ParallelDims, num_bytes: float, tokens_per_s: float) -> MeshStep:
    step_s = 1e6 / tokens_per_s
    rank = RankStep(
        rank=0,
        stages=(0,),
        num_stages=1,
        points=(
            Point(
                position=0,
                unit="model",
                phase="start",
                bytes=dict.fromkeys(KINDS, num_bytes / len(KINDS)),
            ),
        ),
        schedule=Work(matmul_s=step_s),
        update=Work(),
        num_parameters=1,
        num_slot_elements=2,
        num_blocks=1,
        traced_blocks=(1,),
    )
    time = TimeEstimate(
        step_s=step_s,
        compute_s=step_s,
        exposed_s=0,
        bubble_s=0,
        update_s=0,
        mfu=0.5,
        tokens_per_s=tokens_per_s,
    )
    return MeshStep(
        degrees=degrees,
        num_microbatches=1,
        tokens_per_step=1_000_000,
        ranks=(rank,),
        host_bytes=0,
        bubble=0,
        time=time,
    )


def _searched(
    config: Config,
    configured: MeshStep,
    trace: Callable[[ParallelDims], MeshStep],
    limit_gib: float,
    max_traces: int,
) -> MeshSearch:
    return search_meshes(
        _model(config), configured, trace, 8, limit_gib * GIB, max_traces=max_traces
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 5))]
)
@pytest.mark.parametrize("limit_gib", [0.02, 0.1, 100])
@pytest.mark.parametrize("max_traces", [2, MAX_TRACES])
def test_the_result_of_a_search_is_its_own_result(
    seed: int, limit_gib: float, max_traces: int
) -> None:
    config = _config(8)
    trace = _perturbed(_model(config), seed)
    for degrees in (
        ParallelDims(dp_shard=8),
        ParallelDims(pp=2, tp=4),
        ParallelDims(dp_replicate=8),
    ):
        found = _searched(config, trace(degrees), trace, limit_gib, max_traces)
        steps = [*found.meshes, *found.too_large]
        assert degrees in [step.degrees for step in steps]
        assert all(step == trace(step.degrees) for step in steps)
        assert len(steps) <= max_traces + 1
        if not found.meshes:
            continue
        best = found.meshes[0]
        assert best.time.tokens_per_s >= 0.99 * max(one.time.tokens_per_s for one in found.meshes)
        again = _searched(config, best, trace, limit_gib, max_traces)
        assert again.meshes[0] == best


def test_a_search_without_a_fitting_mesh_reports_the_smallest_that_it_traced() -> None:
    config = _config(8)
    trace = _perturbed(_model(config), 0)
    found = search_meshes(_model(config), trace(ParallelDims(dp_shard=8)), trace, 8, 1.0)
    assert found.meshes == ()
    sizes = [step.fullest.peak_bytes for step in found.too_large]
    assert sizes == sorted(sizes) and len(sizes) >= 2


def test_a_search_ends_at_its_limit_and_says_so() -> None:
    config = _config(8)
    trace, calls = _perturbed(_model(config), 0), []

    def counted(degrees: ParallelDims) -> MeshStep:
        calls.append(degrees)
        return trace(degrees)

    configured = trace(ParallelDims(dp_shard=8))
    found = search_meshes(_model(config), configured, counted, 8, 100 * GIB, max_traces=2)
    assert len(calls) == 2
    assert not found.is_complete


def test_layers_that_differ_end_a_search_sooner() -> None:
    config = _config(8)
    trace = _perturbed(_model(config), 0)
    calls: list[ParallelDims] = []

    def traced_whole(degrees: ParallelDims) -> MeshStep:
        calls.append(degrees)
        step = trace(degrees)
        (rank,) = step.ranks
        return replace(step, ranks=(replace(rank, traced_blocks=(MAX_TRACED_LAYERS // 2,)),))

    configured = trace(ParallelDims(dp_shard=8))
    found = search_meshes(_model(config), configured, traced_whole, 8, 100 * GIB)
    assert len(calls) == 2 and not found.is_complete


@pytest.mark.matrix
def test_the_model_agrees_with_every_trace() -> None:
    config = _config(2, **{"training.global_batch_size": 4})
    model = _model(config)
    steps = [_traced(config, degrees) for degrees in (ParallelDims(tp=2), ParallelDims(cp=2))]
    for step in steps:
        model.fit(step)
    for step in steps:
        predicted = model.predict(step.degrees)
        assert predicted.peak_bytes == pytest.approx(step.fullest.peak_bytes)
        assert predicted.tokens_per_s == pytest.approx(step.time.tokens_per_s)


def _best(found: Estimate) -> ParallelDims:
    assert found.search is not None
    return found.search.meshes[0].degrees


def _check_own_result(config: Config, world_size: int, device: str) -> Estimate:
    """Check that the estimate of the best mesh names it again, with the same numbers."""
    found = estimate(config, world_size, device)
    again = estimate(with_degrees(config, _best(found)), world_size, device)
    assert _best(again) == again.degrees == _best(found)
    assert again.search is not None and found.search is not None and again.time is not None
    row = found.search.meshes[0]
    assert (row.fullest.peak_bytes, row.time) == (again.fullest.peak_bytes, again.time)
    assert "The configured mesh is the best." in text(again)
    return found


@pytest.mark.matrix
def test_rows_are_traced_and_the_best_is_selected_by_its_overrides() -> None:
    config = _config(
        2, **{"training.global_batch_size": 4, "parallelism.tensor_parallel_degree": 2}
    )
    found = estimate(config, 2, "h200")
    assert found.search is not None
    row = found.search.meshes[0]
    alone = estimate(with_degrees(config, row.degrees), 2, "h200", search=False)
    assert (row.fullest.peak_bytes, row.time) == (alone.fullest.peak_bytes, alone.time)
    values = as_values(found)
    rows = values["best_meshes"]
    assert [row["mesh"] for row in rows if row["is_configured"]] == [values["mesh"]]
    rates = [row["tokens_per_s"] for row in rows]
    assert len(rates) >= 3 and all(a >= 0.99 * b for a, b in itertools.pairwise(rates))
    assert "(configured)" in text(found) and " ".join(values["search"]["overrides"]) in text(found)


def test_overrides_of_the_command_line_select_the_best_mesh(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\ntensor_parallel_degree = 4\n")
    configured = ParallelDims(dp_shard=2, tp=4)
    for best in (ParallelDims(dp_shard=8), ParallelDims(dp_replicate=2, pp=2, cp=2)):
        arguments = " ".join(overrides(configured, best)).split()
        config, _ = parse_command_line(["--config", str(path), *arguments])
        assert resolve_degrees(config.parallelism, 8) == best


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "h200", replace(H200, memory_bytes=2**20))
    found = estimate(_config(2, **{"training.global_batch_size": 4}), 1, "h200")
    assert found.fits is False
    assert "None of 1 traced meshes of 1 ranks fits h200" in text(found)
    assert as_values(found)["best_meshes"] == []


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_an_estimate_of_the_best_mesh_names_it_again(
    name: str, world_size: int, device: str
) -> None:
    if name == "llama3":
        config = _config(6, **{"training.global_batch_size": 128})
    else:
        values = {
            "model": {"name": "qwen3", "flavor": "debugmodel_moe"},
            "training": {"seq_len": 128, "local_batch_size": 1, "global_batch_size": 64},
        }
        config = config_from(values, "the test")
    _check_own_result(config, world_size, device)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_405b_on_1024_ranks() -> None:
    values = {
        "model": {"name": "llama3", "flavor": "405B"},
        "training": {"seq_len": 8192, "local_batch_size": 1, "global_batch_size": 2048},
        "parallelism": {"tensor_parallel_degree": 8},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        "compile": {"enable": True},
    }
    found = _check_own_result(config_from(values, "the test"), 1024, "h200")
    assert found.search is not None and found.search.is_complete
    assert "in the backward of layer 125:" in text(found)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_the_result_is_the_best_of_all_meshes() -> None:
    config = _config(4)
    found = estimate(config, 4, "h200")
    assert found.time is not None
    model = _model(config)
    valid = [one.degrees for one in model.predictions(4, ()) if model.is_valid(one.degrees)]
    rates = [_traced(config, degrees).time.tokens_per_s for degrees in valid]
    assert found.search is not None
    assert found.search.meshes[0].time.tokens_per_s >= 0.98 * max(rates)
