"""The shard plan of a model family is checked before the model is built."""

from dataclasses import replace

import pytest

from tests.unit.models.tiny import tiny_spec
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.training.builders.model import parallelized_parts


def test_a_rule_that_no_parameter_matches_is_an_error_on_any_mesh(mesh: Mesh) -> None:
    spec = tiny_spec()
    assert len(parallelized_parts(Config(), spec, mesh)) == 1
    rule = replace(spec.shard_plan[0], pattern="layers.*.attention.w9.weight")
    other = replace(spec, shard_plan=(*spec.shard_plan, rule))
    with pytest.raises(MeshError, match=r"w9\.weight, which no parameter matches"):
        parallelized_parts(Config(), other, mesh)
