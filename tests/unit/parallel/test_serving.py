"""The number of ranks over which a copy for generation is sharded."""

from dataclasses import replace

import pytest

from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.models import llama3, qwen3
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.inference import inference_degrees


@pytest.mark.parametrize(
    ("world_size", "copies", "tp"), [(1, 1, 1), (3, 3, 1), (4, 1, 4), (8, 1, 8), (24, 3, 8)]
)
def test_the_largest_degree_that_divides_heads_and_ranks(
    world_size: int, copies: int, tp: int
) -> None:
    spec = llama3.spec_of(llama3.FLAVORS["8B"], "8B")
    assert dict(spec.sharded_sizes)["key/value heads"] == 8
    assert inference_degrees(spec, world_size) == ParallelDims(dp_replicate=copies, tp=tp)


def test_models_without_a_shard_plan_and_small_vocabularies_are_not_sharded() -> None:
    spec = llama3.spec_of(llama3.FLAVORS["8B"], "8B")
    uncut: ModelSpec = replace(spec, shard_plan=())
    assert inference_degrees(uncut, 8) == ParallelDims(dp_replicate=8)
    # With 9 rows over 8 ranks, two each, the last ranks would have none.
    assert inference_degrees(replace(spec, vocab_size=9), 8) == ParallelDims(dp_replicate=4, tp=2)


def test_experts_are_sharded_if_their_features_divide() -> None:
    name = next(name for name, dims in qwen3.FLAVORS.items() if dims.moe is not None)
    spec = replace(
        qwen3.spec_of(qwen3.FLAVORS[name], name), sharded_sizes=(("heads", 4),), expert_width=12
    )
    assert inference_degrees(spec, 8) == ParallelDims(dp_replicate=2, tp=4, etp=4)
    odd = replace(spec, expert_width=22)
    assert inference_degrees(odd, 8) == ParallelDims(dp_replicate=2, tp=4)


def test_an_explicit_degree_is_used_or_rejected() -> None:
    spec = llama3.spec_of(llama3.FLAVORS["8B"], "8B")
    assert inference_degrees(spec, 8, 2) == ParallelDims(dp_replicate=4, tp=2)
    message = r"degree 3 .* processes \(8\) .* 8 key/value heads.* Use one of 1, 2, 4, 8\."
    with pytest.raises(MeshError, match=message):
        inference_degrees(spec, 8, 3)
