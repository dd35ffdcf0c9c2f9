"""Activation checkpointing: the same values, less memory, more work."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.models.tiny import (
    DIMS,
    QWEN3_NEXT,
    tiny_decoder,
    tiny_samples,
    tiny_spec,
    tiny_targets,
)
from torchtitan_lite import parallel
from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.models import qwen3_next
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel import activation_checkpoint
from torchtitan_lite.parallel.pipeline_stages import keep_only

_M = TypeVar("_M", bound=nn.Module)
_MODES = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "every block": {"mode": "selective", "selective_ac_option": "1"},
    "every second": {"mode": "selective", "selective_ac_option": "2"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "full, early": {"mode": "full", "early_stop": True},
}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_loss_and_gradients_are_bitwise_equal(mode: str, dropout: float) -> None:
    plain, checkpointed = tiny_decoder(dropout=dropout), _checkpointed(mode, dropout=dropout)
    assert torch.equal(_loss(plain), _loss(checkpointed))
    names = [name for name, _ in checkpointed.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("mode", "passes"),
    [
        ("none", [1, 1, 1]),
        ("full", [2, 2, 2]),
        ("every block", [2, 2, 2]),
        ("every second", [1, 2, 1]),
        ("op", [2, 2, 2]),
    ],
)
def test_backward_recomputes_the_chosen_blocks(mode: str, passes: list[int]) -> None:
    model = _checkpointed(mode)
    counted: Counter[int] = Counter()
    for number, block in enumerate(model.layers.values()):
        block.get_submodule("attention_norm").register_forward_hook(
            lambda *_, number=number: counted.update([number])
        )
    _loss(model)
    assert [counted[number] for number in range(3)] == passes


def test_every_second_block_of_a_stage_is_recomputed() -> None:
    model, spec = tiny_decoder(num_layers=6), tiny_spec(num_layers=6)
    keep_only(model, spec, ("layers.3", "layers.4", "layers.5"))
    _with_checkpointing(model, spec, _MODES["every second"])
    wrapped = [layer for layer, block in model.layers.items() if "forward" in vars(block)]
    assert wrapped == ["4"]


def test_more_recomputation_frees_more_memory() -> None:
    saved = {mode: _saved_bytes(_checkpointed(mode)) for mode in ("none", "every second", "full")}
    assert saved["full"] < 0.4 * saved["none"]
    assert saved["full"] < saved["every second"] < saved["none"]


def test_op_recomputes_every_other_product_and_never_attention() -> None:
    def run(mode: str) -> Counter[str]:
        # The kernel that training uses on the CPU.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), _CountOps() as ops:
            _loss(_checkpointed(mode, dtype=torch.float32))
        return ops.counts

    none, op, full = run("none"), run("op"), run("full")
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    product, norm = "aten.mm.default", "aten.rsqrt.default"
    assert none[attention] == op[attention] == DIMS.num_layers
    assert full[attention] == 2 * DIMS.num_layers
    # A block has seven products; of each two, the first is kept.
    assert full[product] - none[product] == 7 * DIMS.num_layers
    assert op[product] - none[product] == 3 * DIMS.num_layers
    assert op[norm] == full[norm] > none[norm]


def test_op_solves_the_chunks_of_a_recurrence_once() -> None:
    def run(mode: str) -> int:
        spec = qwen3_next.spec_of(QWEN3_NEXT, "tiny")
        model = spec.build()
        initialize(model, spec.init, seed=3)
        with _CountOps() as ops:
            _loss(_with_checkpointing(model, spec, _MODES[mode]))
        return ops.counts["aten.linalg_solve_triangular.default"]

    # Two of four layers; backward solves a system, too.
    assert (run("none"), run("op"), run("full")) == (4, 4, 6)


def test_products_named_in_the_config_are_always_recomputed() -> None:
    with _CountOps() as plain:
        _loss(_checkpointed("op"))
    with _CountOps() as forced:
        _loss(_checkpointed("op", fqns=["attention.wq", "attention.wk", "attention.wv"]))
    # Without them wo, w1, w3 and w2 are left, of which the first and third are kept.
    product = "aten.mm.default"
    assert forced.counts[product] - plain.counts[product] == 2 * DIMS.num_layers


def test_unknown_modes_are_rejected() -> None:
    with pytest.raises(ValidationError, match="memory_budget is not supported"):
        ActivationCheckpointConfig(mode="memory_budget")
    for option in ("0", "two", "-1", "1.5"):
        with pytest.raises(ValidationError, match='must be "op" or a positive number in quotes'):
            ActivationCheckpointConfig(selective_ac_option=option)


def _checkpointed(
    mode: str,
    *,
    dtype: torch.dtype = torch.float64,
    fqns: list[str] | None = None,
    dropout: float = 0.0,
) -> Decoder:
    model = tiny_decoder(dtype, dropout=dropout)
    settings: dict[str, Any] = dict(_MODES[mode])
    if fqns is not None:
        settings["per_op_sac_force_recompute_mm_shapes_by_fqns"] = fqns
    return _with_checkpointing(model, tiny_spec(), settings)


def _with_checkpointing(model: _M, spec: ModelSpec, settings: Mapping[str, Any]) -> _M:
    config = ActivationCheckpointConfig.model_validate(settings)
    activation_checkpoint.apply_to_operations(model, spec, config, repeatable=False)
    activation_checkpoint.apply_to_blocks(model, spec, config)
    return model


def _loss(model: nn.Module) -> torch.Tensor:
    loss = model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
    loss.backward()
    return loss.detach()


def _saved_bytes(model: Decoder) -> int:
    """Return the bytes that autograd saves in one forward, without the parameters."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
    return sum(kept.values())


class _CountOps(TorchDispatchMode):
    """Counts the operations that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("pp", "is_repeatable"), [(2, True), (1, False)])
def test_a_pipeline_may_recompute_more_than_once(
    pp: int, is_repeatable: bool, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.degrees = ParallelDims(pp=pp)
    asked: list[bool] = []
    for technique in (parallel.compile, parallel.fsdp, parallel.context):
        monkeypatch.setattr(technique, "apply", lambda *given: None)
    monkeypatch.setattr(
        parallel.activation_checkpoint,
        "apply_to_operations",
        lambda *given, repeatable: asked.append(repeatable),
    )
    parallel.parallelize(
        tiny_decoder(torch.float32),
        tiny_spec(),
        mesh,
        parallelism=ParallelismConfig(),
        precision=PrecisionConfig(),
        checkpointing=ActivationCheckpointConfig(mode="none"),
        compilation=CompileConfig(),
    )
    assert asked == [is_repeatable]
