"""Loading and training tokenizers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import AutoTokenizer

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.tokenizer import (
    _add_tokens_of_config,
    load_tokenizer,
    open_tokenizer,
    special_ids,
    train_tokenizer,
)
from torchtitan_lite.data.tokenizer_folder import FILES, token_text


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


def test_text_cannot_contain_special_tokens(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    [ids] = tokenizer.encode_batch(["a<|end_of_text|>b"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|end_of_text|>b"


def with_settings(folder: Path, target: Path, **settings: Any) -> Path:
    """Write a tokenizer folder whose tokenizer.json stores `settings`, like one that was saved
    after use."""
    target.mkdir()
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["dropout"] = settings.pop("dropout", None)
    inner = HuggingFaceTokenizer.from_str(json.dumps(values))
    if "truncation" in settings:
        inner.enable_truncation(**settings["truncation"])
    if "padding" in settings:
        inner.enable_padding(**settings["padding"])
    inner.save(str(target / "tokenizer.json"))
    return target


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": {"max_length": 5}},
        {"truncation": {"max_length": 8, "stride": 2, "direction": "left"}},
        {"padding": {"length": 512}},
        {"padding": {"pad_to_multiple_of": 64, "direction": "left"}},
        {"truncation": {"max_length": 5}, "padding": {"length": 512}},
        {"dropout": 0.5},
    ],
)
@pytest.mark.parametrize("rendered_first", [False, True])
def test_stored_settings_change_neither_texts_nor_conversations(
    settings: dict[str, Any],
    rendered_first: bool,
    tokenizer_folder: Path,
    documents: list[str],
    tmp_path: Path,
) -> None:
    plain = load_tokenizer(tokenizer_folder)
    stored = load_tokenizer(with_settings(tokenizer_folder, tmp_path / "stored", **settings))
    for rendered in (rendered_first, not rendered_first):
        if rendered:
            expected, actual = (
                [ids.tolist() for ids, _, _ in t.encode_rendered(documents)]
                for t in (plain, stored)
            )
        else:
            expected, actual = plain.encode_batch(documents), stored.encode_batch(documents)
        assert actual == expected
    stored.save(tmp_path)
    saved = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.truncation is saved.padding is saved.model.dropout is None


@pytest.mark.parametrize("config", [None, {"eos_token": {"content": "<|begin_of_text|>"}}, {}])
def test_names_of_special_tokens(tokenizer_folder: Path, tmp_path: Path, config) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_id == (0 if config else 1)


def test_tokens_defined_only_in_the_config_get_the_ids_of_transformers(
    documents: list[str], tmp_path: Path
) -> None:
    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator(documents, vocab_size=300, special_tokens=["<|image|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    # As in torchtitan's test tokenizer: ids beyond the vocabulary, and out of order.
    tokens = {
        "128000": {"content": "<|begin|>", "special": True},
        "128001": {"content": "<|end|>", "special": True, "normalized": False},
        "0": {"content": "<|image|>", "special": True},
        "400": {"content": "code", "special": False, "single_word": True},
    }
    config = {
        "added_tokens_decoder": tokens,
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == 304
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (301, 302)
    assert set(ours.special_texts) == set(theirs.all_special_tokens) | {"<|image|>"}
    texts = ["some code, encoded", "<|begin|>a<|pad|><|image|>"]
    expected = [theirs(text, add_special_tokens=False).input_ids for text in texts]
    assert [ids.tolist() for ids, _, _ in ours.encode_rendered(texts)] == expected
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.vocab_size, again.bos_id, again.eos_id) == (304, 301, 302)


@pytest.mark.parametrize("with_decoder", [False, True])
def test_folders_of_early_releases_are_read_as_transformers_does(
    with_decoder: bool, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """special_tokens_map.json and added_tokens.json count unless tokenizer_config.json lists the
    added tokens."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    config: dict[str, Any] = {
        "bos_token": "<|begin_of_text|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if with_decoder:
        config["added_tokens_decoder"] = {"300": {"content": "<a>", "special": True}}
    # As editors on Windows write it.
    mark = b"" if with_decoder else b"\xef\xbb\xbf"
    files = {
        "special_tokens_map.json": {"eos_token": {"content": "<e>"}, "pad_token": "<p>"},
        "added_tokens.json": {"<p>": 302, "<e>": 301, "code": 303},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(mark + json.dumps(config).encode())
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == len(theirs)
    if not with_decoder:
        assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.eos_id == theirs.convert_tokens_to_ids("<e>") == 300
    text = "some code <e> of <p> <a>"
    [(ids, _, _)] = ours.encode_rendered([text])
    assert ids.tolist() == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("config", "bos_id", "eos_id"),
    [
        ({"bos_token": None}, None, 1),
        ({"eos_token": None, "bos_token": None}, None, None),
        ({"add_bos_token": False}, None, 1),
        ({"add_bos_token": True, "add_eos_token": False}, 0, 1),
    ],
)
def test_a_tokenizer_may_have_no_token_at_a_begin_or_an_end(
    config: dict[str, Any], bos_id: int | None, eos_id: int | None, tokenizer_folder, tmp_path: Path
) -> None:
    """As those of Qwen, whose vocabulary has <|endoftext|> all the same."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos_id, eos_id)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.bos_id, again.eos_id) == (bos_id, eos_id)
    if "add_bos_token" in config:
        assert special_ids(tmp_path)["bos_token_id"] == 0


def test_every_file_that_decides_about_tokens_is_in_the_fingerprint(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    seen = set()
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
        seen.add(open_tokenizer(str(tmp_path), (), 300, tmp_path).fingerprint)
    assert len(seen) == 3


def test_the_fingerprint_is_the_same_in_every_release(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Checkpoints store it."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / FILES[-1]).write_bytes(b"[]")
    contents = dict.fromkeys(FILES, b"") | {
        path.name: path.read_bytes() for path in tmp_path.iterdir()
    }
    expected = hashlib.blake2b(digest_size=16)
    for name in FILES:
        expected.update(contents[name] + b"\x1f")
    assert open_tokenizer(str(tmp_path), (), 300, tmp_path).fingerprint == expected.hexdigest()


def test_errors_name_the_folder_and_the_remedy(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"has no tokenizer.json \(that folder contains vocab.json\)"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizer that can be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not a JSON object"):
        load_tokenizer(tmp_path)
    for wrong in ('{"bos_token": 3}', '{"added_tokens_decoder": {"x": "<a>"}}'):
        (tmp_path / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(DataError, match=r"tokenizer_config.json defines its tokens in a way"):
            load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="need 258"):
        train_tokenizer(["a"], 100)


def test_the_options_of_a_token_are_those_of_the_tokenizer_if_it_has_it(tmp_path: Path) -> None:
    """Those of tokenizer_config.json count for tokens that only that file defines."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_tokens([tokenizers.AddedToken("<own>", special=False)])
    config = {"pad_token": "<own>", "eos_token": "<more>"}
    _add_tokens_of_config(inner, config, tmp_path)
    added = inner.get_added_tokens_decoder().values()
    assert {token.content: token.special for token in added} == {"<own>": False, "<more>": True}


def test_a_token_without_a_text_is_named_as_it_is_given() -> None:
    assert token_text("</s>") == token_text({"content": "</s>", "special": True}) == "</s>"
    assert token_text({"special": True}) == "{'special': True}"
