"""Fixtures of the data tests: the documents of the fixture, a tokenizer folder, an opener."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest

from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.data import OpenedData, open_data
from torchtitan_lite.data.tokenizer import train_tokenizer

FIXTURE = Path(__file__).parents[2] / "assets" / "fixture.jsonl"


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return [json.loads(line)["text"] for line in FIXTURE.read_text().splitlines()]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """A tokenizer of at most 300 tokens, trained on the fixture."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(documents, 300).save(folder)
    return folder


Opener = Callable[..., OpenedData]


@pytest.fixture
def opened(tmp_path: Path, tokenizer_folder: Path) -> Iterator[Opener]:
    """A function that runs `open_data` on the fixture with further settings, and closes the result
    at the end."""
    made: list[OpenedData] = []

    def open_with(validation: ValidationConfig | None = None, **settings: Any) -> OpenedData:
        call = {
            "hf_assets_path": str(tokenizer_folder),
            "vocab_size": 300,
            "seed": 7,
            "document_mask": True,
            "pin_memory": False,
            "node": None,
        }
        call |= {key: settings.pop(key) for key in list(settings) if key in call}
        defaults: dict[str, Any] = {"seq_len": 17, "cache_folder": str(tmp_path / "cache")}
        if "corpora" not in settings:
            defaults["dataset_path"] = str(FIXTURE)
        config = DataConfig(**(defaults | settings))
        data = open_data(config, validation or ValidationConfig(), **call)
        made.append(data)
        return data

    yield open_with
    for data in made:
        data.loader.close()
