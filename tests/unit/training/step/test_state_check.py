"""A bit that flips in the state of a rank is found on it, and nothing else is."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.fault_tolerance.replica import Share
from torchtitan_lite.optim import build_optimizer
from torchtitan_lite.training.step.monitor import damaged_ranks, local_flags, non_finite_ranks
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.train_state import TrainState


def _state() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(7, 5),
        "transposed": torch.randn(4, 6).T,
        "moment": torch.randn(9, dtype=torch.float64),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(3.0),
        "empty": torch.zeros(0),
    }


@pytest.mark.parametrize("name", ["weight", "transposed", "moment", "half", "count"])
@pytest.mark.parametrize("bit", [0, 15, -1])
def test_one_bit_is_found_and_its_tensor_named(name: str, bit: int) -> None:
    state, check = _state(), StateCheck()
    assert check.compare(state) is None
    check.seal(state)
    found = check.compare(state)
    assert found is not None and not found.item()
    width = state[name].element_size()
    bits = state[name].untyped_storage()
    place = (8 * width + bit if bit < 0 else bit) // 8
    bits[place] = bits[place] ^ 1 << bit % 8
    found = check.compare(state)
    assert found is not None and found.item()
    assert check.describe().startswith(f"{name} changed")


def test_healing_and_new_tensors_are_no_damage() -> None:
    state, check = _state(), StateCheck()
    check.seal(state)
    state["weight"].add_(1)
    check.entered(Phase.COMPUTE, 3)
    assert check.compare(state) is not None
    check.entered(Phase.HEALING, 3)
    assert check.compare(state) is None
    # The optimizer allocates its state in the first step.
    check.seal(state)
    assert check.compare({**state, "second moment": torch.zeros(3)}) is None


def test_tensors_of_each_device_are_compared_there() -> None:
    # The fake device computes nothing, but refuses to mix devices.
    with FakeTensorMode():
        state = {"weight": torch.zeros(3, device="cuda"), "count": torch.tensor(3.0)}
        check = StateCheck()
        check.seal(state)
        found = check.compare(state)
    assert found is not None and found.device.type == "cuda"


def test_a_rank_without_trained_tensors_has_nothing_to_compare() -> None:
    check = StateCheck()
    check.seal({})
    assert check.compare({}) is None


def test_buffers_that_the_model_writes_are_no_damage() -> None:
    model = torch.nn.BatchNorm1d(3)
    optimizer = build_optimizer(OptimizerConfig(), model, (), detect_device("cpu"))
    state = TrainState(model=model, optimizer=optimizer, lr_scheduler=None, loader=None)  # pyright: ignore[reportArgumentType]
    check = StateCheck()
    check.seal(state.optimized_tensors())
    model(torch.randn(4, 3)).sum().backward()
    found = check.compare(state.optimized_tensors())
    assert found is not None and not found.item()
    optimizer.step(0.1)
    found = check.compare({**state.optimized_tensors()})
    assert found is None and any("optimizer.weight" in name for name in state.optimized_tensors())


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ([4, 6, 4, 4], [1]),
        ([6], [0]),
        ([4, 6], [1]),
        # The weights are at fault.
        ([6, 6], []),
        ([6, 6, 6, 6], []),
        ([4, 4, 6, 6], []),
        # Only the last stage of a pipeline has a loss.
        ([0, 0, 0, 0, 6, 6], []),
        ([4, 4, 4, 6, 6], [3, 4]),
    ],
)
def test_only_a_minority_is_named_for_its_own_loss(flags: list[int], ranks: list[int]) -> None:
    assert non_finite_ranks(torch.tensor(flags, dtype=torch.float64)) == ranks


def test_flags_name_ranks() -> None:
    device = detect_device("cpu")
    share = Share(index=1, count=3, one_batch_per_replica=False)
    with start_mesh(ParallelismConfig(), CommConfig(), device) as mesh:
        totals = torch.zeros(3, dtype=torch.float64)
        for loss, is_damaged in ((1.0, False), (float("nan"), True)):
            flags = local_flags(torch.tensor(loss), torch.tensor(is_damaged), share, mesh)
            totals = flags
            assert damaged_ranks(totals) == ([1] if is_damaged else [])
            assert non_finite_ranks(totals) == ([1] if is_damaged else [])
        assert non_finite_ranks(local_flags(torch.tensor(float("inf")), None, share, mesh)) == [1]
        spare = Share(index=-1, count=3, one_batch_per_replica=False)
        assert not local_flags(torch.tensor(1.0), torch.tensor(True), spare, mesh).any()


def test_a_rank_has_flags_only_of_its_own(mesh: Mesh) -> None:
    loss, damaged = torch.tensor(torch.nan), torch.tensor(1.0)
    flags = {
        index: local_flags(loss, damaged, Share(index=index, count=2), mesh).tolist()
        for index in (-1, 0, 1)
    }
    assert flags == {-1: [0.0, 0.0], 0: [7.0, 0.0], 1: [0.0, 7.0]}
