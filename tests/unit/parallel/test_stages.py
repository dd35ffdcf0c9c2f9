"""Pipeline stages given by a file, and the weights of stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.tiny import DEEPSEEK, tiny_decoder, tiny_spec
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.models import deepseek_v3
from torchtitan_lite.models.llama3 import Llama3Dims, spec_of
from torchtitan_lite.parallel.pipeline_stages import (
    join_stages,
    keep_only,
    plan_stages,
    shared_weights,
    stage_modules,
    stage_weights,
)

SPEC = spec_of(Llama3Dims(dim=16, num_layers=5, num_heads=2, num_kv_heads=1, hidden_dim=32), "5")


@pytest.fixture
def parallelism(tmp_path: Path):
    file = tmp_path / "order.csv"
    file.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")

    def parallelism(**values: Any) -> ParallelismConfig:
        return ParallelismConfig(
            pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file), **values
        )

    return parallelism


def test_stages_and_ranks_follow_the_file(parallelism) -> None:
    plan = plan_stages(SPEC, parallelism(pipeline_parallel_schedule="nonsense"))
    assert plan.ranks == (0, 0, 1)
    assert (plan.of_rank(0), plan.of_rank(1)) == ([0, 1], [2])
    assert plan.order is not None and plan.order.num_microbatches == 1
    assert sum(plan.modules, ()) == SPEC.stage_units


def test_stages_given_by_other_keys_must_be_as_many(parallelism) -> None:
    assert len(plan_stages(SPEC, parallelism(pipeline_parallel_layers_per_stage=3)).modules) == 3
    with pytest.raises(MeshError, match="has 3 stages, but parallelism.pipeline_parallel_layers"):
        plan_stages(SPEC, parallelism(pipeline_parallel_layers_per_stage=1))
    named = [list(SPEC.stage_units[:2]), list(SPEC.stage_units[2:])]
    with pytest.raises(MeshError, match="module_fqns_per_model_part makes 2. Leave it out"):
        plan_stages(SPEC, parallelism(module_fqns_per_model_part=named))


def test_stage_weights_include_layers_embedding_and_output(parallelism) -> None:
    even = parallelism()
    assert stage_weights(plan_stages(SPEC, even), SPEC, even) == (3, 2, 2)
    light = parallelism(
        pipeline_parallel_first_stage_less_layers=0, pipeline_parallel_last_stage_less_layers=1
    )
    assert stage_weights(plan_stages(SPEC, light), SPEC, light) == (2, 2, 2)


@pytest.mark.parametrize(
    ("num_layers", "mtp_depth", "expected"),
    [
        # Each module of multi-token prediction counts as a layer.
        (5, 2, [["tok_embeddings", "0", "1", "2", "3"], ["4", "5", "6", "norm", "output"]]),
        # More of them than a share: the other stages divide the layers.
        (2, 2, [["tok_embeddings", "0", "1"], ["2", "3", "norm", "output"]]),
        (4, 3, [["tok_embeddings", "0", "1"], ["2", "3"], ["4", "5", "6", "norm", "output"]]),
    ],
)
def test_modules_of_multi_token_prediction_are_on_the_last_stage(
    num_layers: int, mtp_depth: int, expected: list[list[str]]
) -> None:
    dims = replace(DEEPSEEK, num_layers=num_layers, mtp_depth=mtp_depth)
    spec = deepseek_v3.spec_of(dims, "tiny")
    plan = plan_stages(spec, ParallelismConfig(pipeline_parallel_degree=len(expected)))
    found = [[name.removeprefix("layers.") for name in stage] for stage in plan.modules]
    assert found == expected
    # For future tokens.
    assert stage_modules(plan, spec, len(expected) - 1) == ("tok_embeddings", *plan.modules[-1])
    assert stage_modules(plan, spec, 0) == plan.modules[0]
    last = len(expected) - 1
    assert shared_weights(plan, spec) == [(("tok_embeddings", "tok_embeddings"), (0, last))]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1F1B", (0, 1, 2)),
        ("Interleaved1F1B", (0, 1, 2, 0, 1, 2)),
        # The last stage is on the first rank.
        ("ZBVZeroBubble", (0, 1, 2, 2, 1, 0)),
    ],
)
def test_ranks_hold_the_stages_of_the_schedule(schedule: str, ranks: tuple[int, ...]) -> None:
    config = ParallelismConfig(pipeline_parallel_degree=3, pipeline_parallel_schedule=schedule)
    spec = tiny_spec(num_layers=6)
    assert plan_stages(spec, config).ranks == ranks


@pytest.mark.parametrize(
    ("num_layers", "remedy"),
    [(7, "Use at most 6 stages"), (1, "Set pipeline_parallel_degree to at most 1")],
)
def test_too_few_layers_have_a_remedy(num_layers: int, remedy: str) -> None:
    config = ParallelismConfig(
        pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=1,
        pipeline_parallel_last_stage_less_layers=4,
    )  # fmt: skip
    with pytest.raises(MeshError, match=f"^{num_layers} layers of .* {remedy}, or lower "):
        plan_stages(tiny_spec(num_layers=num_layers), config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("held", [[0], [1], [0, 1]], ids=str)
def test_joined_stages_have_each_parameter_of_the_rank_once(
    held: list[int], tied: bool, mesh: Mesh
) -> None:
    spec, model = tiny_spec(tied_embeddings=tied), tiny_decoder(tied_embeddings=tied)
    units = list(spec.stage_units)
    parts = []
    for stage in held:
        parts.append(tiny_decoder(tied_embeddings=tied))
        keep_only(parts[-1], spec, [units[:2], units[2:]][stage])
    assert join_stages(parts, spec, mesh) is parts[0]
    mesh.degrees = ParallelDims(pp=2)
    names = [name for name, _ in join_stages(parts, spec, mesh).named_parameters()]
    of_units = [unit for stage in held for unit in [units[:2], units[2:]][stage]]
    # The embedding's stage owns a weight that the output shares.
    owned = [unit for unit in of_units if not (tied and unit == "output")]
    expected = [
        name
        for name, _ in model.named_parameters()
        if any(name.startswith(f"{unit}.") for unit in owned)
    ]
    assert sorted(names) == sorted(expected)


def test_the_copy_of_an_embedding_for_future_tokens_is_not_joined(mesh: Mesh) -> None:
    spec = deepseek_v3.spec_of(replace(DEEPSEEK, mtp_depth=1), "mtp")
    plan = plan_stages(spec, ParallelismConfig(pipeline_parallel_degree=2))
    mesh.degrees = ParallelDims(pp=2)
    for stage, has_embedding in ((0, True), (1, False)):
        part = spec.build()
        keep_only(part, spec, stage_modules(plan, spec, stage))
        joined = dict(join_stages([part], spec, mesh).named_children())
        assert ("tok_embeddings" in joined, "output" in joined) == (
            has_embedding,
            not has_embedding,
        )


_UNITS = list(SPEC.stage_units)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([_UNITS[:2], _UNITS[3:]], rf"leaves out {_UNITS[2]}\."),
        ([_UNITS[:2], [*_UNITS[2:], "layers.9"]], r"names layers\.9, which the model does not"),
        ([_UNITS[2:], _UNITS[:2]], "does not keep the order of forward"),
        ([_UNITS[:3], _UNITS[2:]], "names a module twice"),
    ],
)
def test_named_modules_are_those_of_the_model_in_its_order(
    modules: list[list[str]], message: str
) -> None:
    config = ParallelismConfig(pipeline_parallel_degree=2, module_fqns_per_model_part=modules)
    with pytest.raises(MeshError, match=message):
        plan_stages(SPEC, config)


def test_named_modules_of_multi_token_prediction_must_be_on_the_last_stage() -> None:
    spec = deepseek_v3.spec_of(replace(DEEPSEEK, mtp_depth=2), "mtp")
    units = list(spec.stage_units)
    at = units.index(spec.prediction_units[-1])
    config = ParallelismConfig(
        pipeline_parallel_degree=2, module_fqns_per_model_part=[units[:at], units[at:]]
    )
    with pytest.raises(MeshError, match="must be on the last stage"):
        plan_stages(spec, config)
