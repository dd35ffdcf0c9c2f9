"""Module lookup by pattern."""

from tests.unit.models.tiny import tiny_decoder, tiny_spec
from torchtitan_lite.nn.spec import blocks_of, modules_matching


def test_blocks_are_found_in_model_order_without_their_parts() -> None:
    model = tiny_decoder(num_layers=12)
    assert blocks_of(model, tiny_spec()) == list(model.layers.values())


def test_a_pattern_matches_only_at_its_own_depth() -> None:
    model = tiny_decoder()
    assert modules_matching(model, "*norm*") == [model.norm]
    assert modules_matching(model, "output", "tok_*") == [model.tok_embeddings, model.output]
    assert len(modules_matching(model, "layers.*.attention.w?")) == 12
    assert modules_matching(model, "nothing") == []
