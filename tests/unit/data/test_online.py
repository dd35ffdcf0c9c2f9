"""Online data sets: samples that a user's package makes while the run trains."""

from collections.abc import Callable, Sequence

import pytest

from torchtitan_lite.core.errors import ConfigError, DataError
from torchtitan_lite.core.registry import REGISTRY, register_loss, register_online_dataset
from torchtitan_lite.data import OpenedData
from torchtitan_lite.data.online import OnlineSample
from torchtitan_lite.nn.spec import IGNORE_INDEX

Opener = Callable[..., OpenedData]


class _Counting:
    """Sample i has the tokens i, i + 1, i + 2, of which the last is a target, with weight i / 2."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.requested: list[int] = []

    def read(self, samples: Sequence[int]) -> Sequence[OnlineSample]:
        self.requested += samples
        return [
            OnlineSample(
                tokens=[one, one + 1, one + 2],
                are_targets=[False, False, True],
                values={"weight": [0.0, 0.0, one / 2]},
            )
            for one in samples
        ]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> list[_Counting]:
    """The data sets that are opened under the name "counting"."""
    made: list[_Counting] = []

    def make(path: str | None) -> _Counting:
        made.append(_Counting(path))
        return made[-1]

    monkeypatch.setitem(REGISTRY.online_datasets, "counting", make)
    return made


def test_samples_are_read_when_a_step_needs_them(opened: Opener, datasets: list[_Counting]) -> None:
    loader = opened(dataset="counting", dataset_path="somewhere", seq_len=4).loader
    assert datasets[0].path == "somewhere"
    loader.prefetch([range(6, 8)], step=2)
    first, second = loader.load([range(2, 4), (4, -1)], step=1)
    assert datasets[0].requested == [2, 3, 4]
    assert first.tokens_BS.tolist() == [[2, 3, 4, 0], [3, 4, 5, 0]]
    rest = [IGNORE_INDEX] * 2
    assert first.targets_BS.tolist() == [[IGNORE_INDEX, 4, *rest], [IGNORE_INDEX, 5, *rest]]
    assert first.target_values["weight"].tolist() == [[0, 1, 0, 0], [0, 1.5, 0, 0]]
    assert second.target_values["weight"].tolist() == [[0, 2, 0, 0], [0, 0, 0, 0]]
    assert (second.targets_BS[1] == IGNORE_INDEX).all()


def test_a_sample_may_be_as_long_as_a_block(opened: Opener, datasets: list[_Counting]) -> None:
    (batch,) = opened(dataset="counting", seq_len=2).loader.load([range(6, 7)], step=1)
    assert batch.tokens_BS.tolist() == [[6, 7]]
    assert batch.targets_BS.tolist() == [[IGNORE_INDEX, 8]]


def test_a_run_resumes_at_its_cursor(opened: Opener, datasets: list[_Counting]) -> None:
    state = opened(dataset="counting", seq_len=4).loader.state(40)
    assert not datasets[0].requested
    opened(dataset="counting", seq_len=4).loader.load_state(state)
    with pytest.raises(DataError, match="kind online, now table"):
        opened().loader.load_state(state)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            OnlineSample(tokens=[1] * 6, are_targets=[True] * 6),
            r"6 tokens, .* training\.seq_len \+ 1 = 5",
        ),
        (OnlineSample(tokens=[300], are_targets=[True]), r"outside of \[0, 300\)"),
        (OnlineSample(tokens=[1, 2], are_targets=[True]), "2 tokens, and 1 of are_targets"),
        (
            OnlineSample(tokens=[1], are_targets=[True], values={"weight": []}),
            "1 tokens, and 0 of weight",
        ),
        (None, "0 samples instead of 1"),
    ],
)
def test_wrong_samples_are_errors(
    sample: OnlineSample | None, message: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def read(self, samples: Sequence[int]) -> Sequence[OnlineSample]:
            return [] if sample is None else [sample]

    monkeypatch.setitem(REGISTRY.online_datasets, "wrong", lambda path: Wrong())
    loader = opened(dataset="wrong", seq_len=4).loader
    with pytest.raises(DataError, match=message):
        loader.load([range(1)], step=1)


def test_it_has_no_documents(opened: Opener, datasets: list[_Counting]) -> None:
    with pytest.raises(DataError, match=r"Set model\.hf_assets_path"):
        opened(dataset="counting", hf_assets_path=None)


def test_names_are_registered_once(datasets: list[_Counting]) -> None:
    with pytest.raises(ConfigError, match='data set "counting" is registered twice'):
        register_online_dataset("counting", _Counting)
    register_loss("test_online", list)
    try:
        with pytest.raises(ConfigError, match='loss "test_online" is registered twice'):
            register_loss("test_online", dict)
    finally:
        del REGISTRY.losses["test_online"]
