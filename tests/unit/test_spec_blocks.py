"""Module lookup by pattern."""

from dataclasses import replace

from tests.unit.models.tiny import tiny_decoder, tiny_spec
from torchtitan_lite.nn.spec import blocks_of, modules_matching, named_blocks
from torchtitan_lite.parallel.pipeline_stages import keep_only


def test_blocks_are_found_in_model_order_without_their_parts() -> None:
    model = tiny_decoder(num_layers=12)
    assert blocks_of(model, tiny_spec()) == list(model.layers.values())


def test_blocks_have_their_number_in_the_entire_model() -> None:
    model, spec = tiny_decoder(num_layers=12), tiny_spec(num_layers=12)
    expected = [(layer, f"layers.{layer}", model.layers[str(layer)]) for layer in range(12)]
    assert named_blocks(model, spec) == expected
    assert named_blocks(model, replace(spec, stage_units=())) == expected
    keep_only(model, spec, ("layers.4", "layers.10"))
    assert named_blocks(model, spec) == [expected[4], expected[10]]
    assert blocks_of(model, spec) == [expected[4][2], expected[10][2]]


def test_a_pattern_matches_only_at_its_own_depth() -> None:
    model = tiny_decoder()
    assert modules_matching(model, "*norm*") == [model.norm]
    assert modules_matching(model, "output", "tok_*") == [model.tok_embeddings, model.output]
    assert len(modules_matching(model, "layers.*.attention.w?")) == 12
    assert modules_matching(model, "nothing") == []
