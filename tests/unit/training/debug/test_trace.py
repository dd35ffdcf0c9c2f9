"""The trace of a step: the communication, derived from the sizes of the model and the mesh."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import MANY_EXPERTS, ODD_DIMS, Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import CP, FSDP, MESHES, TP
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.debug import traced_step
from torchtitan_lite.training.debug.communication import Collective
from torchtitan_lite.training.debug.table import columns, fold_module_name, folded
from torchtitan_lite.training.debug.trace import StepTracer

# torch warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Pools = Callable[[int], WorkerPool]
Row = tuple[str, str, str, str, int]
"""Phase, module, operation, axis, bytes."""

DIM, LAYERS, ROWS, HIDDEN = 36, 3, 517, 50
QUERIES, KEYS = 6 * 10, 2 * 10
SAMPLES, SEQ_LEN, FLOAT64 = 8, 24, 8


def _world(ranks: int) -> Row:
    """Return the values that ranks agree on: those of the step, of its checkpoint, and seven per
    rank."""
    return "step", "model", "all_reduce", "world", (17 + 7 * ranks) * FLOAT64


assert (ODD_DIMS.dim, ODD_DIMS.num_layers, ODD_DIMS.hidden_dim) == (DIM, LAYERS, HIDDEN)


def _traces(
    pools: Pools, folder: Path, world_size: int, overrides: Mapping[str, Any], steps: int = 1
) -> list[dict[str, Any]]:
    """Return the traces of all ranks, which are processes: a whole job has state that threads would
    share."""
    settings = {**overrides, "training.steps": steps, "debug.trace_communication": True}
    pools(world_size).run(run_job, folder, settings)
    files = [folder / f"communication_rank_{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) for file in files]


def _counts(trace: Mapping[str, Any]) -> Counter[Row]:
    assert [one["order"] for one in trace["collectives"]] == list(range(len(trace["collectives"])))
    assert {one["dtype"] for one in trace["collectives"]} == {"float64"}
    return Counter(
        (
            one["phase"],
            fold_module_name(one["module"]),
            one["operation"],
            one["axis"],
            one["num_bytes"],
        )
        for one in trace["collectives"]
    )


def _rows(rows: int) -> int:
    """Return the rows per rank with FSDP on two ranks, which pads them to equal shards."""
    return rows + rows % 2


def test_fsdp_gathers_each_unit_and_scatters_its_gradient(pools: Pools, tmp_path: Path) -> None:
    matrices = (QUERIES + 2 * KEYS) * DIM + DIM * QUERIES + 2 * HIDDEN * DIM + DIM * HIDDEN
    block = (matrices + 2 * DIM) * FLOAT64
    rows, norm = _rows(ROWS) * DIM * FLOAT64, DIM * FLOAT64
    units = {"model": norm, "tok_embeddings": rows, "layers.*": block, "output": rows}
    number = {"layers.*": LAYERS}
    expected = Counter({_world(2): 1})
    for unit, num_bytes in units.items():
        expected["forward", unit, "all_gather", "dp_shard", num_bytes] = number.get(unit, 1)
        expected["backward", unit, "reduce_scatter", "dp_shard", num_bytes] = number.get(unit, 1)
        # The root and the last unit are not freed in between.
        if unit not in ("model", "output"):
            expected["backward", unit, "all_gather", "dp_shard", num_bytes] = number.get(unit, 1)
    overrides = {**FSDP, "training.local_batch_size": 4}
    for rank, trace in enumerate(_traces(pools, tmp_path / "run", 2, overrides, steps=2)):
        assert _counts(trace) == expected
        assert (trace["step"], trace["rank"], trace["mesh"]["dp_shard"]) == (2, rank, 2)
        assert trace["peak_memory_bytes"]["layers.1"].keys() == {"forward", "backward"}


def _tensor_parallel(samples_at_once: int, microbatches: int) -> Counter[Row]:
    stream = samples_at_once * SEQ_LEN * DIM * FLOAT64
    per_token = samples_at_once * SEQ_LEN * FLOAT64
    in_layers = LAYERS * microbatches
    expected = Counter[Row]()
    # Gathered along the sequence before the matrices and scattered after them, and the reverse in
    # backward.
    for reader, writer in (("attention", "wo"), ("feed_forward", "w2")):
        inputs, outputs = f"layers.*.{reader}", f"layers.*.{reader}.{writer}"
        expected["forward", inputs, "all_gather", "tp", stream] = in_layers
        expected["backward", inputs, "reduce_scatter", "tp", stream] = in_layers
        expected["forward", outputs, "reduce_scatter", "tp", stream] = in_layers
        expected["backward", outputs, "all_gather", "tp", stream] = in_layers
    expected["forward", "tok_embeddings", "reduce_scatter", "tp", stream] = microbatches
    expected["backward", "tok_embeddings", "all_gather", "tp", stream] = microbatches
    expected["forward", "output", "all_gather", "tp", stream] = microbatches
    expected["backward", "output", "reduce_scatter", "tp", stream] = microbatches
    # The maximum, the sum and the target's logit of each token.
    expected["forward", "output", "all_reduce", "tp", per_token] = 3 * microbatches
    return expected


def test_tensor_parallelism_gathers_and_scatters_the_sequence(pools: Pools, tmp_path: Path) -> None:
    # Norms see only a part of the sequence, so their gradients are summed at the end.
    norms: Row = ("step", "model", "all_reduce", "tp", DIM * FLOAT64)
    expected = _tensor_parallel(2, 2)
    expected.update({norms: 2 * LAYERS + 1, _world(2): 1})
    for trace in _traces(pools, tmp_path / "run", 2, {**TP, "training.global_batch_size": 4}):
        assert _counts(trace) == expected


@pytest.mark.matrix
def test_each_axis_has_its_own_collectives(pools: Pools, tmp_path: Path) -> None:
    heads = (QUERIES + 2 * KEYS) // 2 * DIM + DIM * QUERIES // 2
    feed_forward = 2 * _rows(HIDDEN // 2) * DIM + DIM * HIDDEN // 2
    block = (heads + feed_forward + 2 * DIM) * FLOAT64
    for trace in _traces(pools, tmp_path / "run", 4, TP):
        counts = _counts(trace)
        along = {axis: Counter[Row]() for axis in ("tp", "dp_shard", "world")}
        for row, count in counts.items():
            along[row[3]][row] = count
        assert along["world"] == {_world(4): 1}
        during = Counter({row: n for row, n in along["tp"].items() if row[0] != "step"})
        # FSDP scatters full gradients, so those of the norms are summed over tp before.
        expected = _tensor_parallel(2, SAMPLES // 4)
        expected["backward", "layers.*", "all_reduce", "tp", DIM * FLOAT64] = 2 * LAYERS * 2
        expected["backward", "model", "all_reduce", "tp", DIM * FLOAT64] = 2
        assert during == expected
        of_blocks = {row: n for row, n in along["dp_shard"].items() if row[1] == "layers.*"}
        assert of_blocks == {
            ("forward", "layers.*", "all_gather", "dp_shard", block): LAYERS * 2,
            ("backward", "layers.*", "all_gather", "dp_shard", block): LAYERS * 2,
            ("backward", "layers.*", "reduce_scatter", "dp_shard", block): LAYERS * 2,
        }


def test_a_pipeline_sends_between_its_stages(pools: Pools, tmp_path: Path) -> None:
    hidden = SEQ_LEN * DIM * FLOAT64
    for trace in _traces(pools, tmp_path / "run", 2, MESHES["pp-2"][1], steps=2):
        assert _counts(trace) == {
            ("other", "model", "send", "pp", hidden): SAMPLES,
            ("other", "model", "recv", "pp", hidden): SAMPLES,
            _world(2): 1,
        }


def test_a_ring_sends_within_attention(pools: Pools, tmp_path: Path) -> None:
    ring = {
        **CP,
        "training.local_batch_size": SAMPLES,
        "model.attention_mask": "causal",
        "parallelism.context_parallel_rotate_method": "alltoall",
    }
    pair = 2 * SAMPLES * KEYS * (SEQ_LEN // 2) * FLOAT64
    for trace in _traces(pools, tmp_path / "run", 2, ring):
        kernel = "layers.*.attention.kernel"
        in_ring = {row: n for row, n in _counts(trace).items() if row[1] == kernel}
        # Forward passes keys and values around once; backward does so too, and passes their
        # gradients around twice, until they reach their owner.
        assert in_ring == {
            ("forward", kernel, "send", "cp", pair): LAYERS,
            ("forward", kernel, "recv", "cp", pair): LAYERS,
            ("backward", kernel, "send", "cp", pair): 3 * LAYERS,
            ("backward", kernel, "recv", "cp", pair): 3 * LAYERS,
        }


@pytest.mark.matrix
def test_experts_have_their_own_axes(pools: Pools, tmp_path: Path) -> None:
    overrides = {
        "model.name": "qwen3",
        "model.flavor": "many_experts",
        "parallelism.expert_parallel_degree": 2,
        "training.global_batch_size": 4,
    }
    dims = MANY_EXPERTS.moe
    assert dims is not None
    # Counts and tokens are sent to the experts, results are sent back, and gradients go both ways.
    stack_bytes = 3 * dims.hidden_dim * DIM * FLOAT64
    for trace in _traces(pools, tmp_path / "run", 4, overrides):
        travels = [one for one in trace["collectives"] if one["operation"] == "all_to_all"]
        places = Counter(
            (one["phase"], fold_module_name(one["module"]), one["axis"]) for one in travels
        )
        assert places == {
            ("forward", "layers.*.feed_forward.experts", "ep"): 3 * LAYERS,
            ("backward", "layers.*.feed_forward.experts", "ep"): 2 * LAYERS,
        }
        gathers = Counter(
            one["num_bytes"]
            for one in trace["collectives"]
            if (one["operation"], one["axis"], one["phase"])
            == ("all_gather", "expert_shard", "forward")
        )
        assert gathers == {dims.num_experts // 2 * stack_bytes: LAYERS}


@pytest.mark.matrix
def test_recomputation_belongs_to_backward(pools: Pools, tmp_path: Path) -> None:
    # Both tools at once, because each installs a dispatch mode and hooks.
    both = {"activation_checkpoint.mode": "full", "debug.explicit_redistribution": True}
    recompute = {**TP, **both, "training.global_batch_size": 2}
    for trace in _traces(pools, tmp_path / "run", 2, recompute):
        counts = _counts(trace)
        stream = 2 * SEQ_LEN * DIM * FLOAT64
        for operation, module in (
            ("all_gather", "layers.*.attention"),
            ("reduce_scatter", "layers.*.attention.wo"),
            ("all_gather", "layers.*.feed_forward"),
        ):
            row = module, operation, "tp", stream
            assert counts["backward", *row] == counts["forward", *row] == LAYERS


@pytest.mark.parametrize("mesh", [pytest.param("tp-2", marks=pytest.mark.matrix), "fsdp-2"])
def test_training_is_the_same_bit_by_bit(mesh: str, pools: Pools, tmp_path: Path) -> None:
    world_size, overrides = MESHES[mesh]
    sizes = {"training.local_batch_size": 2, "training.global_batch_size": 4}
    overrides = {**overrides, **sizes, "training.steps": 2}
    plain: list[Outcome] = pools(world_size).run(run_job, tmp_path / "plain", overrides)
    settings = {**overrides, "debug.trace_communication": True, "debug.trace_communication_step": 1}
    traced: list[Outcome] = pools(world_size).run(run_job, tmp_path / "traced", settings)
    for one, other in zip(plain, traced, strict=True):
        assert one.losses == other.losses and one.grad_norms == other.grad_norms
        assert all(one.weights[name].equal(other.weights[name]) for name in one.weights)
    assert not list((tmp_path / "plain").glob("communication*"))


def test_the_leader_writes_a_table(pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (trace,) = _traces(pools, folder, 1, {"training.local_batch_size": 2})
    assert trace["step"] == 1 and trace["collectives"] == []
    written = (folder / "communication.txt").read_text()
    assert written.startswith("Step 1 on rank 0 of the mesh: one process.")
    assert "layers.*.attention.wq" in written


def test_which_step_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    assert traced_step(None, resume_step=0, last_step=10) == 2
    assert traced_step(None, resume_step=7, last_step=10) == 9
    assert traced_step(None, resume_step=9, last_step=10) == 10
    assert traced_step(5, resume_step=0, last_step=10) == 5
    assert not caplog.records
    assert traced_step(5, resume_step=5, last_step=10) == 5
    assert "Nothing will be traced" in caplog.text


def test_a_step_beyond_the_last_is_rejected() -> None:
    debug = {"trace_communication": True, "trace_communication_step": 9}
    config = Config.model_validate({"debug": debug, "training": {"steps": 8}})
    with pytest.raises(ConfigError, match=r"trace_communication_step \(9\) is above .*\(8\)"):
        check_against(config, 1)


def test_equal_collectives_are_counted_together() -> None:
    one = Collective(
        order=0, operation="all_gather", axis="tp", num_bytes=8, dtype="float32",
        module="layers.1.attention", phase="forward",
    )  # fmt: skip
    other = replace(one, axis="cp")
    found = folded([one, other, replace(one, module="layers.2.attention", order=2)])
    names = ("module", "axis", "count", "num_bytes_in_all")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("layers.*.attention", "tp", 2, 16),
        ("layers.*.attention", "cp", 1, 8),
    ]


def test_a_repeated_step_is_traced_once(mesh: Mesh, tmp_path: Path) -> None:
    tracer = StepTracer([], mesh, traced_step=2, folder=tmp_path, tensors=dict)
    for number, is_traced in ((1, False), (2, True), (2, False), (3, False)):
        context = tracer.step(number)
        assert isinstance(context, nullcontext) is not is_traced
        with context:
            assert isinstance(tracer.in_schedule(), nullcontext) is not is_traced
    assert isinstance(tracer.in_schedule(), nullcontext)
    trace = json.loads((tmp_path / "communication_rank_0.json").read_text())
    assert trace["step"] == 2 and (tmp_path / "communication.txt").exists()


def test_the_last_columns_are_aligned_right() -> None:
    text = columns(("name", "a", "b"), [("x", "1", "20"), ("longer", "300", "4")], numbers=2)
    assert text.splitlines() == ["name      a   b", "x         1  20", "longer  300   4"]
