"""The data sections of the config."""

import pytest
from pydantic import ValidationError

from torchtitan_lite.config.tables.data import CorpusConfig, DataConfig
from torchtitan_lite.config.tables.section import field_texts
from torchtitan_lite.config.tables.validation import ValidationConfig


def test_corpora_replace_the_single_dataset_keys() -> None:
    config = DataConfig.model_validate({"corpora": [{"dataset": "c4", "weight": 2}, {}]})
    assert [corpus.weight for corpus in config.resolved_corpora()] == [2.0, 1.0]
    with pytest.raises(ValidationError, match="dataset_path = 'x'; name the data either"):
        DataConfig(corpora=[CorpusConfig()], dataset_path="x")


def test_a_resolved_config_loads_again() -> None:
    config = DataConfig(corpora=[CorpusConfig(dataset="text", dataset_path="x")])
    assert DataConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_len": 0},
        {"local_batch_size": 0},
        {"global_batch_size": 0},
        {"held_out_fraction": -0.1},
        {"batch_size_warmup": [[100]], "global_batch_size": 8},
        {"batch_size_warmup": [[0, 4]], "global_batch_size": 8},
        {"batch_size_warmup": [[100, 0]], "global_batch_size": 8},
        {"batch_size_warmup": [[100, 4]]},
        {"batch_size_warmup": [[100, 4], [100, 4]], "global_batch_size": 8},
        {"batch_size_warmup": [[100, 8]], "global_batch_size": 8},
        {"corpora": [{"weight": 0}]},
        {"dataloader": {"num_workers": -1}},
        {"no_such_key": 1},
        {"seq_len": "64"},
    ],
)
def test_invalid_values_are_rejected(settings: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        DataConfig.model_validate(settings)


def test_every_key_is_described() -> None:
    for section in (CorpusConfig, DataConfig, ValidationConfig):
        texts = field_texts(section)
        assert [name for name in section.model_fields if not texts.get(name)] == []
