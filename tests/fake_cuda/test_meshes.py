"""Every mesh on a GPU without values: no operator mixes devices, the state lies where it should,
and the host waits for the device no more often than the budget allows."""

from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.job import observe_in_child, shapes_in_child
from tests.harness.hugging_face import FAMILIES, add_tokenizer, save_config
from tests.parity.meshes import EXPERT_MESHES, MESHES, in_short_suite

TOTALS = "torchtitan_lite/training/step/totals.py read"
COUNTS = "torchtitan_lite/parallel/expert.py run"
CAPACITY = "torchtitan_lite/nn/dispatch.py dispatch"
_PIPELINE, _OFFLOAD = "parallelism.pipeline_parallel_degree", "training.enable_cpu_offload"

STEP_BUDGET = {TOTALS: 1}
"""Host waits per step: the totals are read once."""
EXPERT_BUDGET: dict[str, dict[int, dict[str, int]]] = {
    # One per MoE layer and forward: the sizes of the exchange. Forward runs once per microbatch,
    # and again to recompute; a rank of a pipeline has some of the three layers.
    "ep-2": {0: {COUNTS: 12}},
    "etp-2": {0: {COUNTS: 3}},
    "ep-2-fsdp-4": {0: {COUNTS: 3}},
    "ep-4": {0: {COUNTS: 3}},
    "ep-2-etp-2": {0: {COUNTS: 3}},
    "hsdp-2x2-ep-2": {0: {COUNTS: 3}},
    "ep-2-cp-2": {0: {COUNTS: 3}},
    "tp-2": {0: {}},
    "tp-2-ep-2": {0: {COUNTS: 6}},
    "tp-2-etp-2": {0: {COUNTS: 6}},
    "tp-2-ep-2-whole-sequence": {0: {COUNTS: 6}},
    "fsdp-2-tp-2-ep-4": {0: {COUNTS: 3}},
    "fsdp-2-tp-2-ep-2": {0: {COUNTS: 3}},
    "pp-2-ep-2": {0: {COUNTS: 8}, 3: {COUNTS: 4}},
    "ep-2-recompute-full": {0: {COUNTS: 6}},
    "ep-2-recompute-op": {0: {COUNTS: 6}},
    "pp-2-tp-2-ep-4": {0: {COUNTS: 8}, 7: {COUNTS: 4}},
    "ep-2-fsdp-8": {0: {COUNTS: 3}},
    # With a capacity, the number of copies that are left is read too.
    "ep-2-fsdp-8-few": {0: {COUNTS: 3, CAPACITY: 3}},
    "ep-2-softmax": {0: {COUNTS: 3, CAPACITY: 3}},
    "ep-2-cpu-offload": {0: {COUNTS: 3}},
    "pp-2-zbv-ep-2-fsdp-4": {0: {COUNTS: 4}, 7: {COUNTS: 8}},
    "ep-4-fsdp-2-cp-2-tp-2": {0: {COUNTS: 12}},
}
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
"""Without a driver, inductor cannot generate kernels."""


def _rows(meshes: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(
            name,
            rank,
            compiled,
            id=f"{name}-rank-{rank}-{'compiled' if compiled else 'eager'}",
            marks=[] if in_short_suite(name) and not compiled else [pytest.mark.matrix],
        )
        for name, (size, overrides) in meshes.items()
        # Only the stages of a pipeline run different code.
        for rank in ([0, size - 1] if overrides.get(_PIPELINE, 1) > 1 else [0])
        for compiled in (False, True)
    ]


@pytest.mark.parametrize(("mesh", "rank", "compiled"), _rows(MESHES))
def test_the_host_waits_once_per_step(mesh: str, rank: int, compiled: bool, tmp_path: Path) -> None:
    size, overrides = MESHES[mesh]
    overrides = {**overrides, **(COMPILED if compiled else {})}
    observed = observe_in_child(tmp_path, size, rank, overrides)
    assert observed.waits[-1] == STEP_BUDGET
    # The device has work while the host waits; offloaded weights are on the host.
    # One update per parameter group.
    is_offloaded = bool(overrides.get(_OFFLOAD))
    updates = [] if is_offloaded else ["update", "update"]
    assert observed.order == [*updates, TOTALS]
    assert (observed.num_graphs > 0) == compiled
    _check_devices(observed.devices, is_offloaded=bool(overrides.get(_OFFLOAD)))


@pytest.mark.parametrize(("mesh", "rank", "compiled"), _rows(EXPERT_MESHES))
def test_the_host_waits_once_more_per_moe_layer(
    mesh: str, rank: int, compiled: bool, tmp_path: Path
) -> None:
    size, overrides = EXPERT_MESHES[mesh]
    overrides = {**EXPERTS, **overrides, **(COMPILED if compiled else {})}
    observed = observe_in_child(tmp_path, size, rank, overrides)
    assert observed.waits[-1] == {**STEP_BUDGET, **EXPERT_BUDGET[mesh][rank]}
    assert (observed.num_graphs > 0) == compiled
    _check_devices(observed.devices, is_offloaded=bool(overrides.get(_OFFLOAD)))


@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "phi3_long", "qwen2_moe"),
        *(pytest.param(family, marks=pytest.mark.matrix) for family in FAMILIES),
    ],
)
def test_the_host_waits_once_per_step_of_each_architecture(family: str, tmp_path: Path) -> None:
    """With all experts on each rank."""
    folder = add_tokenizer(save_config(tmp_path / "hf", family))
    model = {"model.flavor": "hf", "model.hf_assets_path": str(folder)}
    size, overrides = MESHES["fsdp-2"]
    observed = observe_in_child(tmp_path, size, 0, {**overrides, **model})
    assert observed.waits[-1] == STEP_BUDGET
    _check_devices(observed.devices, is_offloaded=False)


@pytest.mark.parametrize("mesh", ["fsdp-2-tp-2", "pp-2-zbv", "tp-2-cp-2-fsdp-2"])
def test_weights_have_the_shapes_of_a_cpu(mesh: str, tmp_path: Path) -> None:
    size, overrides = MESHES[mesh]
    on_device, on_cpu = shapes_in_child(tmp_path, size, size - 1, overrides)
    assert on_device == on_cpu and len(on_device) > 10


@pytest.mark.parametrize("mesh", ["ep-2-etp-2", "ep-2-fsdp-8-few", "pp-2-tp-2-ep-4"])
def test_experts_have_the_shapes_of_a_cpu(mesh: str, tmp_path: Path) -> None:
    size, overrides = EXPERT_MESHES[mesh]
    on_device, on_cpu = shapes_in_child(tmp_path, size, size - 1, {**EXPERTS, **overrides})
    assert on_device == on_cpu and len(on_device) > 10


def _check_devices(devices: dict[str, str], *, is_offloaded: bool) -> None:
    for name, device in devices.items():
        on_host = is_offloaded and not name.endswith("_X")
        assert device == ("cpu" if on_host else "cuda:0"), name
