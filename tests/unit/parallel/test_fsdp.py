"""FSDP on one process: when it is omitted, mixed precision, offload, and freeing of weights.
tests/parity checks on several ranks that gradients are summed and not averaged."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness.threads import run_on_threads
from tests.harness.tolerances import CHUNKED_LOSS_BFLOAT16
from tests.unit.models.tiny import (
    QWEN3_EXPERTS,
    tiny_decoder,
    tiny_samples,
    tiny_spec,
    tiny_targets,
)
from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.device import Device, detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.models import qwen3
from torchtitan_lite.nn.attention import BlockContext
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.moe import SwiGLUExperts
from torchtitan_lite.parallel import fsdp, parallelize
from torchtitan_lite.parallel.precision import precision_policy

_MIXED = PrecisionConfig(mixed_precision_param="bfloat16")
_OFFLOADED = _MIXED.model_copy(update={"enable_cpu_offload": True})
"""With offload, a single rank in mixed precision uses FSDP."""


def test_one_rank_in_full_precision_is_not_wrapped(mesh: Mesh) -> None:
    model = tiny_decoder(torch.float32)
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), PrecisionConfig())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_the_blocks_the_specs_additions_and_the_rest(mesh: Mesh, tied: bool) -> None:
    model = _sharded(mesh, tied_embeddings=tied)
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    blocks = {"", "layers.0", "layers.1", "layers.2"}
    assert units == (blocks if tied else blocks | {"tok_embeddings", "output"})
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", ["default", "always", "never"])
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(
    mesh: Mesh, policy: str, tied: bool
) -> None:
    model = _sharded(mesh, policy, tied_embeddings=tied)
    reference = tiny_decoder(torch.bfloat16, tied_embeddings=tied)
    _backward(model)
    _backward(reference)
    for sharded, full in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor) and full.grad is not None
        assert sharded.dtype == sharded.grad.dtype == torch.float32
        scale = full.grad.abs().max()
        error = (sharded.grad.full_tensor() - full.grad.float()).abs().max()
        assert error <= CHUNKED_LOSS_BFLOAT16 * scale


@pytest.mark.parametrize("tied", [False, True])
def test_a_single_rank_computes_what_fsdp_does_without_its_copies(mesh: Mesh, tied: bool) -> None:
    plain, wrapped = (tiny_decoder(torch.float32, tied_embeddings=tied) for _ in range(2))
    spec = tiny_spec(tied_embeddings=tied)
    fsdp.apply(plain, spec, mesh, ParallelismConfig(), _MIXED)
    fsdp.apply(wrapped, spec, mesh, ParallelismConfig(), _OFFLOADED)
    assert not any(isinstance(module, FSDPModule) for module in plain.modules())
    assert torch.equal(_backward(plain), _backward(wrapped))
    assert plain.state_dict().keys() == wrapped.state_dict().keys()
    for name, parameter in plain.named_parameters():
        other = wrapped.get_parameter(name).grad
        assert parameter.grad is not None and isinstance(other, DTensor)
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        # Tied weights are read twice: FSDP adds their gradients in bfloat16, casts in float32.
        if not tied or "embeddings" not in name:
            assert torch.equal(parameter.grad, other.full_tensor())


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_single_rank_is_wrapped_if_the_model_is_split(mesh: Mesh, axis: str) -> None:
    """FSDP casts each weight once for all microbatches of a pipeline."""
    mesh.degrees = ParallelDims(**{axis: 2})
    model = tiny_decoder(torch.float32)
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), _MIXED)
    assert all(isinstance(block, FSDPModule) for block in model.layers.values())


@pytest.mark.parametrize("precision", [_MIXED, _OFFLOADED], ids=["casts", "FSDP"])
def test_rotations_stay_float32(mesh: Mesh, precision: PrecisionConfig) -> None:
    model = tiny_decoder(torch.float32)
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), precision)
    found: list[tuple[torch.dtype, torch.dtype]] = []

    def record(module: Any, inputs: tuple[torch.Tensor, BlockContext], out: Any) -> None:
        x_BSD, context = inputs
        assert context.cos_BS1E is not None
        found.append((x_BSD.dtype, context.cos_BS1E.dtype))

    for block in model.layers.values():
        block.register_forward_hook(record)
    model(**tiny_samples())
    assert found == [(torch.bfloat16, torch.float32)] * 3


def test_weights_stay_tied_where_they_are_read_as_casts(mesh: Mesh) -> None:
    with torch.device("meta"):
        model = tiny_decoder(torch.float32, tied_embeddings=True)
    fsdp.apply(model, tiny_spec(tied_embeddings=True), mesh, ParallelismConfig(), _MIXED)
    num_parameters = len(list(model.parameters()))
    model.to_empty(device="cpu")
    assert len(list(model.parameters())) == num_parameters
    assert model.tok_embeddings is not None
    assert model.tok_embeddings.weight.dtype == torch.bfloat16


def test_gradients_of_offloaded_weights_equal_those_without_offload(mesh: Mesh) -> None:
    model, reference = tiny_decoder(torch.float32), tiny_decoder(torch.float32)
    precision = PrecisionConfig(enable_cpu_offload=True)
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), precision)
    assert isinstance(model, FSDPModule)
    assert torch.equal(_backward(model), _backward(reference))
    for sharded, full in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor) and full.grad is not None
        assert torch.equal(sharded.grad.full_tensor(), full.grad)


def test_weights_gathered_by_a_forward_without_backward_are_freed(mesh: Mesh) -> None:
    model = _sharded(mesh)
    with torch.no_grad():
        model(**tiny_samples())
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    fsdp.reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "float64"}, torch.float64),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"mixed_precision_param": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "mixed_precision_param": "float32"}, torch.float32),
    ],
)
def test_the_compute_dtype_on_the_cpu_defaults_to_that_of_the_weights(
    settings: dict[str, Any], expected: torch.dtype
) -> None:
    precision = PrecisionConfig.model_validate(settings)
    assert precision_policy(precision, detect_device("cpu")).compute == expected


def test_the_compute_dtype_on_a_gpu_defaults_to_bfloat16() -> None:
    gpu = Device(
        torch_device=torch.device("cuda", 0),
        backend="cpu:gloo,cuda:nccl",
        pin_memory=True,
        fused_optimizer=True,
        peak_flops=None,
    )
    assert precision_policy(PrecisionConfig(), gpu).compute == torch.bfloat16
    plain = PrecisionConfig(mixed_precision_param="float32")
    assert precision_policy(plain, gpu).compute == torch.float32


def test_offloaded_shards_are_freed_after_forward_but_the_last(mesh: Mesh) -> None:
    model = _sharded(mesh)
    model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
    *blocks, last = [module for module in model.modules() if isinstance(module, FSDPModule)][1:]
    assert len(blocks) > 2
    # They would fill the device.
    assert all(isinstance(next(block.parameters()), DTensor) for block in blocks)
    # Backward begins with it.
    assert not isinstance(next(last.parameters()), DTensor)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (_OFFLOADED, torch.float32),
        (PrecisionConfig(enable_cpu_offload=True), None),
        (PrecisionConfig(dtype="float64", enable_cpu_offload=True), None),
    ],
    ids=["bfloat16", "float32", "float64"],
)
def test_gradients_are_summed_in_at_least_float32(
    mesh: Mesh, precision: PrecisionConfig, dtype: torch.dtype | None
) -> None:
    """None: in the dtype of the weights."""
    with mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as fully_shard:
        model = tiny_decoder(getattr(torch, precision.dtype))
        fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), precision)
    policies = [call.kwargs["mp_policy"] for call in fully_shard.call_args_list]
    assert len(policies) > 1 and {policy.reduce_dtype for policy in policies} == {dtype}


@pytest.mark.parametrize("precision", [PrecisionConfig(), _MIXED], ids=["float32", "mixed"])
def test_matrices_of_several_ranks_are_only_wrapped_to_be_cast(
    mesh: Mesh, precision: PrecisionConfig
) -> None:
    mesh.degrees = ParallelDims(tp=2)
    model = tiny_decoder(torch.float32)
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), precision)
    assert isinstance(model, FSDPModule) == (precision is _MIXED)


@pytest.mark.parametrize(
    ("degrees", "frees"),
    [
        ({"dp_shard": 2}, True),
        ({"cp": 2}, True),
        ({"dp_shard": 2, "tp": 2}, True),
        ({"dp_replicate": 2}, False),
        ({"dp_replicate": 2, "tp": 2}, False),
        ({"dp_shard": 2, "pp": 2}, False),
        ({"cp": 2, "pp": 2}, False),
    ],
    ids=str,
)
def test_blocks_are_freed_if_they_are_sharded_and_run_once(
    mesh: Mesh, degrees: dict[str, int], frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.degrees = ParallelDims(**degrees)
    monkeypatch.setattr(fsdp, "_sharding_mesh", lambda mesh: None)
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        fsdp.apply(
            tiny_decoder(torch.float32), tiny_spec(), mesh, ParallelismConfig(), PrecisionConfig()
        )
    first, *_ = fully_shard.call_args_list
    assert first.kwargs["reshard_after_forward"] == frees


@pytest.mark.parametrize("ep", [1, 2])
def test_blocks_whose_experts_alone_are_sharded_are_freed_after_forward(ep: int) -> None:
    """With ep = 2 nothing is left to shard, and no block is wrapped."""

    def frees() -> list[bool]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(tp=2, ep=ep))
        with torch.device("meta"):
            model = build_decoder(dims)
        parallelize(
            model,
            qwen3.spec_of(dims, "tiny"),
            mesh,
            parallelism=ParallelismConfig(enable_sequence_parallel=False),
            precision=PrecisionConfig(),
            checkpointing=ActivationCheckpointConfig(mode="none"),
            compilation=CompileConfig(),
        )
        return [
            bool(block._get_fsdp_state()._fsdp_param_groups[0]._reshard_after_forward)
            for block in model.layers.values()
            if isinstance(block, FSDPModule)
        ]

    assert QWEN3_EXPERTS.moe is not None
    dims = replace(QWEN3_EXPERTS, moe=replace(QWEN3_EXPERTS.moe, num_experts=8))
    assert run_on_threads(2, frees) == [[True] * dims.num_layers * (ep == 1)] * 2


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
@pytest.mark.parametrize(
    ("degrees", "weights", "experts"),
    [
        (ParallelDims(dp_shard=4), [0, 1, 2, 3], [0, 1, 2, 3]),
        (ParallelDims(dp_shard=2, cp=2), [0, 1, 2, 3], [0, 1, 2, 3]),
        (ParallelDims(dp_shard=2, tp=2, ep=2), [0, 2], [0, 2]),
        (ParallelDims(dp_replicate=2, dp_shard=2), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (ParallelDims(dp_replicate=2, cp=2, ep=2), [[0, 1], [2, 3]], [[0], [2]]),
    ],
    ids=str,
)
def test_weights_are_sharded_within_replicas_over_the_ranks_that_hold_them(
    degrees: ParallelDims, weights: list[Any], experts: list[Any]
) -> None:
    """Ranks of each dim of the mesh, for the weights and the experts of rank 0."""

    def meshes() -> list[Any]:
        mesh = Mesh(detect_device("cpu"), degrees)
        found = (fsdp._sharding_mesh(mesh), fsdp._expert_sharding_mesh(mesh))
        return [one.mesh.tolist() for one in found]

    assert run_on_threads(4, meshes)[0] == [weights, experts]


@pytest.mark.parametrize(("num_shards", "dim"), [(2, 0), (4, 0), (8, 1), (12, 0)])
def test_experts_are_sharded_over_a_dim_that_gives_each_rank_a_part(
    mesh: Mesh, num_shards: int, dim: int
) -> None:
    experts = SwiGLUExperts(3, 8, num_experts=4)
    for name in experts.WIDTH_DIMS:
        stack = distribute_tensor(getattr(experts, name), mesh.device_mesh["tp"])
        experts.register_parameter(name, torch.nn.Parameter(stack))
    mesh.degrees = ParallelDims(dp_shard=num_shards)
    placement = fsdp._expert_placement(experts, mesh, {0: 0, 1: 1})
    assert placement(experts.w1) == dim and placement(torch.nn.Parameter(torch.ones(2))) is None


def _sharded(mesh: Mesh, policy: str = "default", **changes: Any) -> Decoder:
    model = tiny_decoder(torch.float32, **changes)
    parallelism = ParallelismConfig.model_validate({"fsdp_reshard_after_forward": policy})
    fsdp.apply(model, tiny_spec(**changes), mesh, parallelism, _OFFLOADED)
    return model


def _backward(model: Decoder) -> torch.Tensor:
    loss = model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
    loss.backward()
    return loss.detach()
