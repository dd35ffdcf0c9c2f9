"""Compilation block by block. tests/parity compares the results."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import InvalidBackend
from torch._dynamo.testing import CompileCounter

from tests.unit.models.tiny import DIMS, tiny_decoder, tiny_samples, tiny_spec
from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.nn.initialize import on_meta
from torchtitan_lite.parallel import compile, parallelize


@pytest.mark.parametrize(
    "config", [CompileConfig(), CompileConfig(enable=True, components=["loss"])]
)
def test_blocks_are_compiled_only_if_enabled(config: CompileConfig, mesh: Mesh) -> None:
    model = tiny_decoder()
    config = config.model_copy(update={"backend": "no such backend"})
    compile.apply(model, tiny_spec(), mesh, config)
    model(**tiny_samples())


def test_all_blocks_share_one_graph(mesh: Mesh) -> None:
    counter = CompileCounter()
    model, plain = tiny_decoder(num_layers=5).eval(), tiny_decoder(num_layers=5).eval()
    config = CompileConfig(enable=True).model_copy(update={"backend": counter})
    compile.apply(model, tiny_spec(num_layers=5), mesh, config)
    with torch.no_grad():
        compiled = model(**tiny_samples())
        assert torch.equal(compiled, plain(**tiny_samples()))
    assert counter.frame_count == 1
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert DIMS.num_layers != 5


def test_blocks_with_dropout_share_one_graph(mesh: Mesh) -> None:
    """Although each has keys of its own."""
    counter, sizes = CompileCounter(), {"num_layers": 5, "dropout": 0.2}
    model, plain = tiny_decoder(**sizes), tiny_decoder(**sizes)
    config = CompileConfig(enable=True).model_copy(update={"backend": counter})
    compile.apply(model, tiny_spec(**sizes), mesh, config)
    with torch.no_grad():
        assert torch.equal(model(**tiny_samples()), plain(**tiny_samples()))
    assert counter.frame_count == 1


def test_with_tensor_parallelism_another_batch_size_is_another_graph(mesh: Mesh) -> None:
    """DTensor does not support a symbolic one."""
    mesh.degrees = ParallelDims(tp=2)
    counter, model = CompileCounter(), tiny_decoder(num_layers=1).eval()
    config = CompileConfig(enable=True).model_copy(update={"backend": counter})
    compile.apply(model, tiny_spec(num_layers=1), mesh, config)
    with torch.no_grad():
        for batch_size in (2, 3, 4):
            model(**tiny_samples(batch_size, length=5))
    assert counter.frame_count == 3


@pytest.mark.parametrize(
    ("tp", "capacity", "dynamic", "is_one_graph"),
    [(1, None, None, True), (2, None, False, True), (2, 1.5, None, False), (1, 1.5, None, False)],
)
def test_what_a_block_contains_decides_on_its_graphs(
    tp: int, capacity: float | None, dynamic: bool | None, is_one_graph: bool, mesh: Mesh
) -> None:
    mesh.degrees = ParallelDims(tp=tp)
    spec = replace(tiny_spec(), expert_capacity_factor=capacity)
    with mock.patch.object(torch, "compile", side_effect=lambda forward, **_: forward) as compiled:
        compile.apply(tiny_decoder(), spec, mesh, CompileConfig(enable=True))
    assert compiled.call_count == spec.num_layers
    for call in compiled.call_args_list:
        assert (call.kwargs["dynamic"], call.kwargs["fullgraph"]) == (dynamic, is_one_graph)


def test_a_parallelized_model_is_compiled(mesh: Mesh) -> None:
    config = CompileConfig(enable=True).model_copy(update={"backend": "no such backend"})
    with pytest.raises(InvalidBackend):
        parallelize(
            on_meta(tiny_decoder, torch.float32),
            tiny_spec(),
            mesh,
            parallelism=ParallelismConfig(),
            precision=PrecisionConfig(),
            checkpointing=ActivationCheckpointConfig(),
            compilation=config,
        )
