"""Context parallelism of recurrent layers: its bytes, uneven pieces, and what it cannot do. The
meshes are in test_windowed_families.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import ODD_QWEN3_NEXT, run_job
from tests.harness.ranks import RankFailed, WorkerPool
from tests.parity.meshes import CP, assert_same

Pools = Callable[[int], WorkerPool]
MODEL = {"model.name": "qwen3_next", "model.flavor": "odd"}
WHOLE_BATCH = {"training.local_batch_size": 8}
FLOAT64 = 8


def exchanged(pools: Pools, folder: Path, overrides: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return phase, operation and bytes of the exchanges of the first layer, which is recurrent."""
    settings = {**MODEL, **CP, **WHOLE_BATCH, **overrides, "debug.trace_communication": True}
    pools(2).run(run_job, folder, settings)
    trace = json.loads((folder / "communication_rank_0.json").read_text())
    return [
        (one["phase"], one["operation"], one["num_bytes"])
        for one in trace["collectives"]
        if one["axis"] == "cp" and one["module"].endswith("layers.0.attention")
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_the_exchange_of_states_does_not_depend_on_the_length(
    method: str, pools: Pools, tmp_path: Path
) -> None:
    rotation = {"parallelism.context_parallel_rotate_method": method}
    short, long = (
        exchanged(pools, tmp_path / str(length), {"training.seq_len": length, **rotation})
        for length in (24, 48)
    )
    assert short == long
    linear = ODD_QWEN3_NEXT.linear_attention
    key, value, heads = linear.key_head_dim, linear.value_head_dim, linear.num_value_heads
    channels = 2 * linear.num_heads * key + heads * value
    # Of two pieces per rank of eight samples.
    inputs = 8 * 2 * 2 * (linear.kernel_size - 1) * channels * FLOAT64
    maps = 8 * 2 * 2 * heads * key * (key + value) * FLOAT64
    of_a_sample = [
        ("forward", "all_gather", inputs),
        ("forward", "all_gather", maps),
        ("backward", "reduce_scatter", maps),
        ("backward", "reduce_scatter", inputs),
    ]
    assert sorted(short) == sorted(of_a_sample * (len(short) // 4)) and short


@pytest.mark.matrix
def test_pieces_as_short_as_the_convolution(pools: Pools, tmp_path: Path) -> None:
    """Four ranks with two pieces of three positions each."""
    (alone,) = pools(1).run(run_job, tmp_path / "1", {**MODEL, **WHOLE_BATCH})
    mesh = {"parallelism.context_parallel_degree": 4, **WHOLE_BATCH}
    for outcome in pools(4).run(run_job, tmp_path / "n", {**MODEL, **mesh}):
        assert_same(outcome, alone, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("world_size", "overrides", "message"),
    [
        (
            2,
            {**CP, "training.seq_len": 8},
            r"seq_len \(8\) leaves 2 positions for each of the 4 pieces .* Set it to at least 12, "
            "or lower the degree",
        ),
        (
            2,
            {**CP, "parallelism.context_parallel_rotate_method": "alltoall"},
            "ring attention. cannot keep attention within documents",
        ),
        (
            3,
            {"parallelism.tensor_parallel_degree": 3},
            r"tensor_parallel_degree \(3\) does not divide the 4 key heads of Gated DeltaNet",
        ),
    ],
)
def test_what_is_not_supported_is_one_clear_error(
    world_size: int, overrides: dict[str, Any], message: str, pools: Pools, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=message):
        pools(world_size).run(run_job, tmp_path / "run", {**MODEL, **overrides})
