"""Loading and training tokenizers."""

import json
from pathlib import Path

import pytest

from torchtitan_lite.data.tokenizer import load_tokenizer, train_tokenizer
from torchtitan_lite.errors import DataError


def test_training_is_deterministic_and_text_survives(documents: list[str], tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_tokenizer(iter(documents), 320).save(tmp_path / name)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1]
    tokenizer = load_tokenizer(tmp_path / "a")
    assert tokenizer.vocab_size == 320
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    texts = [*documents, "日本語 \x00 \U0001f600"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_text_cannot_forge_a_special_token(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    [ids] = tokenizer.encode_batch(["a<|end_of_text|>b"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|end_of_text|>b"


@pytest.mark.parametrize("config", [None, {"eos_token": {"content": "<|begin_of_text|>"}}, {}])
def test_names_of_special_tokens(tokenizer_folder: Path, tmp_path: Path, config) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_id == (0 if config else 1)


def test_errors_name_the_folder_and_the_remedy(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no tokenizer.json \(that folder holds vocab.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizer that can be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<nope>"}')
    with pytest.raises(DataError, match="bos_token = '<nope>'"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="need 258"):
        train_tokenizer(["a"], 100)
