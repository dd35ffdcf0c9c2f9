"""TrainState: what a restart needs, and its round trip through a checkpoint."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.optimizers import OPTIMIZERS_BY_IMPLEMENTATION
from tests.unit.models.tiny import tiny_decoder, tiny_samples, tiny_spec, tiny_targets
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.config.tables.lr_scheduler import LRSchedulerConfig
from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.data import OpenedData, open_data
from torchtitan_lite.data.tokenizer import train_tokenizer
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.training.anomalies import StepStatistics
from torchtitan_lite.training.train_state import TrainState

_FIXTURE = Path(__file__).parents[2] / "assets" / "fixture.jsonl"

MakeState = Callable[..., TrainState]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedData]:
    folder = tmp_path_factory.mktemp("data")
    texts = [json.loads(line)["text"] for line in _FIXTURE.read_text().splitlines()]
    (folder / "tokenizer").mkdir()
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    opened = open_data(
        DataConfig(seq_len=17, dataset_path=str(_FIXTURE), cache_folder=str(folder / "cache")),
        ValidationConfig(),
        hf_assets_path=str(folder / "tokenizer"),
        vocab_size=300,
        seed=0,
        document_mask=False,
        pin_memory=False,
    )
    yield opened
    opened.loader.close()


@pytest.fixture
def make_state(data: OpenedData) -> MakeState:
    def make(name: str = "AdamW", implementation: str = "fused", **changes: bool) -> TrainState:
        config = OptimizerConfig.model_validate({"name": name, "implementation": implementation})
        model = tiny_decoder(torch.float32, **changes)
        return TrainState(
            model=model,
            optimizer=build_optimizer(config, model, tiny_spec().no_decay, detect_device("cpu")),
            lr_scheduler=build_lr_scheduler(LRSchedulerConfig(), config, 100),
            loader=data.loader,
        )

    return make


def test_weights_come_first_and_the_optimizer_follows_after_its_first_step(
    make_state: MakeState,
) -> None:
    state = make_state()
    names = [name for name, _ in state.model.named_parameters()]
    assert list(state.tensors()) == [f"model.{name}" for name in names]
    _step(state)
    slots = [f"optimizer.{n}.{s}" for n in names for s in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(state.tensors()) == sorted([*(f"model.{name}" for name in names), *slots])


def test_tensors_are_the_live_ones(make_state: MakeState) -> None:
    state = make_state()
    state.tensors()["model.norm.weight"].fill_(3.0)
    assert (dict(state.model.named_parameters())["norm.weight"] == 3).all()


def test_tied_weights_are_saved_once_and_derived_buffers_never(make_state: MakeState) -> None:
    state = make_state(tied_embeddings=True)
    state.model.register_buffer("kept", torch.ones(2))
    names = set(state.tensors())
    assert "model.tok_embeddings.weight" in names and "model.output.weight" not in names
    assert "model.kept" in names
    assert not any("frequencies" in name for name in names)


def test_values_are_plain_json_and_survive_a_round_trip(make_state: MakeState) -> None:
    state = make_state()
    state.step, state.tokens, state.cursor = 7, 1234, 56
    state.statistics.record_commit(7, 0.1, 1 / 3, window=4)
    state.statistics.record_skip()
    values = json.loads(json.dumps(state.values()))
    assert set(values) == {"train_state", "lr_scheduler", "dataloader"}
    other = make_state()
    other.load_values(values)
    assert (other.step, other.tokens, other.cursor) == (7, 1234, 56)
    assert other.values() == state.values()
    # As saved by an earlier release.
    del values["train_state"]["history"]
    other.load_values(values)
    assert other.step == 7 and other.statistics == StepStatistics()


def test_parts_that_are_omitted_keep_their_values(make_state: MakeState) -> None:
    state = make_state()
    state.step, state.tokens, state.cursor = 7, 1234, 56
    values = state.values()
    data_only, step_only = make_state(), make_state()
    data_only.load_values({"dataloader": values["dataloader"]})
    step_only.load_values({"train_state": values["train_state"]})
    assert (data_only.step, data_only.tokens, data_only.cursor) == (0, 0, 56)
    assert (step_only.step, step_only.tokens, step_only.cursor) == (7, 1234, 0)


def test_histories_of_earlier_releases_are_restored() -> None:
    saved = {
        "losses": [1.0],
        "grad_norms": [2.0],
        "refused_in_a_row": 3,
        "roll_backs_in_a_row": 1,
        "furthest": 9,
        "returns": [[7, 80]],
    }
    statistics = StepStatistics.of(saved)
    assert (statistics.consecutive_skips, statistics.consecutive_rollbacks) == (3, 1)
    assert (statistics.rolled_back_from, statistics.rollbacks) == (9, [[7, 80]])
    assert statistics.values() == saved


def test_the_lr_scheduler_is_that_of_the_config_and_not_the_saved_one(
    make_state: MakeState,
) -> None:
    state, longer = make_state(), make_state()
    config = LRSchedulerConfig(total_steps=1000)
    longer.lr_scheduler = build_lr_scheduler(config, OptimizerConfig(), 100)
    longer.load_values(state.values())
    assert longer.lr_scheduler.total_steps == 1000


@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS_BY_IMPLEMENTATION)
def test_allocated_slots_equal_those_that_torch_creates(
    make_state: MakeState, name: str, implementation: str
) -> None:
    stepped, allocated = make_state(name, implementation), make_state(name, implementation)
    _step(stepped)
    made = stepped.tensors()
    allocated.allocate({key: tuple(tensor.shape) for key, tensor in made.items()})
    there = allocated.tensors()
    assert there.keys() == made.keys()
    for key, tensor in made.items():
        assert (there[key].shape, there[key].dtype, there[key].device) == (
            tensor.shape,
            tensor.dtype,
            tensor.device,
        )
        assert not there[key].requires_grad


def test_allocation_keeps_existing_slots_and_skips_unknown_names(
    make_state: MakeState,
) -> None:
    state = make_state()
    _step(state)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    state.allocate(shapes | {"optimizer.no.such.weight.exp_avg": (3,), "rest": (1,)})
    after = state.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS_BY_IMPLEMENTATION)
def test_training_from_a_checkpoint_equals_uninterrupted_training(
    make_state: MakeState, tmp_path: Path, name: str, implementation: str
) -> None:
    uninterrupted, stopped = make_state(name, implementation), make_state(name, implementation)
    for _ in range(4):
        _step(uninterrupted)
    for _ in range(2):
        _step(stopped)
    resumed = make_state(name, implementation)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        for state in (stopped, resumed):
            manager = CheckpointManager(
                CheckpointConfig(enable=True),
                dump_folder=tmp_path,
                state=state,
                mesh=mesh,
                run_config={},
            )
            if state is stopped:
                manager.final_save(finished=False)
            else:
                assert manager.restore() is not None
    for _ in range(2):
        _step(resumed)
    expected, actual = uninterrupted.tensors(), resumed.tensors()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert resumed.step == 4 and resumed.cursor == 12


def _step(state: TrainState) -> None:
    """Take one plain step on the same samples."""
    state.optimizer.zero_grad()
    model: nn.Module = state.model
    model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy()).div(46).backward()
    state.optimizer.step(state.lr_scheduler.lr(state.step))
    state.step += 1
    state.cursor += 3


def test_the_state_of_adapters_of_other_weights_is_not_loaded() -> None:
    def refuse(recorded: object) -> None:
        raise CheckpointError(f"they belong to {recorded}")

    state: Any = SimpleNamespace(base=SimpleNamespace(check=refuse), step=0)
    with pytest.raises(CheckpointError, match="they belong to others"):
        TrainState.load_values(state, {"train_state": {"base": "others", "step": 3}})
    assert state.step == 0
