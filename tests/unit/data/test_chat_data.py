"""Samples of conversations: packed, cached, resumed and divided like those of texts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.unit.data.chat_templates import CHAT, CHATML, write_tokenizer
from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import OpenedData
from torchtitan_lite.data.chat_template import DEFAULT_TEMPLATE
from torchtitan_lite.nn.spec import IGNORE_INDEX

TEXTS = CHAT.parent / "fixture.jsonl"
SEQ_LEN = 40
Opener = Callable[..., OpenedData]


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), DEFAULT_TEMPLATE)


@pytest.fixture
def opened_chat(opened: Opener, chat_folder: Path) -> Iterator[Opener]:
    """`opened` on the conversations of the asset."""

    def open_with(validation: ValidationConfig | None = None, **settings: Any) -> OpenedData:
        call: dict[str, Any] = {
            "hf_assets_path": str(chat_folder),
            "vocab_size": 420,
            "seq_len": SEQ_LEN,
        }
        if "corpora" not in settings:
            call |= {"dataset_path": str(CHAT), "messages_column": "messages"}
        return opened(validation, **(call | settings))

    yield open_with


def blocks_of(data: OpenedData) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the targets of each block, by its tokens."""
    [state] = data.loader.state(0)["corpora"]
    [batch] = data.loader.load([range(state["num_blocks"])], step=0)
    tokens, targets = batch.tokens_BS.tolist(), batch.targets_BS.tolist()
    return {tuple(row): tuple(expected) for row, expected in zip(tokens, targets, strict=True)}


def test_samples_are_the_packed_conversations(opened_chat: Opener, chat_folder: Path) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chat_folder)
    tokens, masks, owners = [], [], []
    for number, line in enumerate(CHAT.read_text().splitlines()):
        made: Any = theirs.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        tokens += made["input_ids"]
        masks += made["assistant_masks"]
        owners += [number] * len(made["input_ids"])
    expected, documents = {}, {}
    for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN):
        places = range(start, start + SEQ_LEN)
        key = tuple(tokens[place] for place in places)
        expected[key] = tuple(tokens[p + 1] if masks[p + 1] else IGNORE_INDEX for p in places)
        documents[key] = [owners[place] - owners[start] for place in places]
    data = opened_chat()
    assert blocks_of(data) == expected
    assert any(set(targets) == {IGNORE_INDEX} for targets in expected.values())
    assert 0.2 < np.mean([t != IGNORE_INDEX for row in expected.values() for t in row]) < 0.8
    [batch] = data.loader.load([range(9)], step=0)
    assert batch.documents_BS is not None
    for row, numbers in zip(batch.tokens_BS.tolist(), batch.documents_BS.tolist(), strict=True):
        assert documents[tuple(row)] == numbers


def test_a_change_in_a_users_message_changes_no_target(opened_chat: Opener, tmp_path: Path) -> None:
    text = CHAT.read_text()
    assert text.count("Is a whale a fish?") == 1
    changed = tmp_path / "changed.jsonl"
    before, after = opened_chat(), None
    # A word of as many tokens, so that the blocks can be compared.
    changed.write_text(text.replace("Is a whale a fish?", "Is a fish a whale?"))
    after = opened_chat(dataset_path=str(changed))
    rows = [before.loader.load([range(60)], 0)[0], after.loader.load([range(60)], 0)[0]]
    assert not torch.equal(rows[0].tokens_BS, rows[1].tokens_BS)
    assert torch.equal(rows[0].targets_BS, rows[1].targets_BS)


def test_the_cache_is_reused_and_depends_on_the_template(
    opened_chat: Opener, chat_folder: Path, tmp_path: Path
) -> None:
    def folders() -> dict[str, int]:
        actual = (tmp_path / "cache" / "tokens").glob("*/meta.json")
        return {meta.parent.name: meta.stat().st_mtime_ns for meta in actual}

    first = opened_chat()
    made = folders()
    again = opened_chat(seq_len=SEQ_LEN + 3)
    assert folders() == made and len(made) == 1
    other = tmp_path / "other"
    other.mkdir()
    for file in chat_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert blocks_of(opened_chat(hf_assets_path=str(other))) == blocks_of(first)
    assert folders() == made
    # The ids are the same but other tokens are targets: the sample order is not continued.
    template = DEFAULT_TEMPLATE.replace(
        "trim + '<|eot_id|>' }}\n        {%- endg", "trim }}{%- endg"
    )
    (other / "chat_template.jinja").write_text(
        template.replace("{%- endgeneration %}", "{%- endgeneration %}{{- '<|eot_id|>' }}")
    )
    changed = opened_chat(hf_assets_path=str(other))
    assert len(folders()) == 2
    assert blocks_of(changed).keys() == blocks_of(first).keys()
    assert blocks_of(changed) != blocks_of(first)
    with pytest.raises(DataError, match="digest"):
        changed.loader.load_state(first.loader.state(0))
    opened_chat().loader.load_state(first.loader.state(0))
    assert again.loader.state(0)["corpora"][0]["seq_len"] == SEQ_LEN + 3


def test_texts_have_no_targets_file(opened: Opener, tmp_path: Path) -> None:
    opened()
    [part] = (tmp_path / "cache" / "tokens").glob("*/train")
    assert sorted(file.name for file in part.iterdir()) == ["documents.bin", "tokens.bin"]


def test_texts_and_conversations_in_one_blend(opened_chat: Opener) -> None:
    corpora = [
        CorpusConfig(dataset_path=str(TEXTS)),
        CorpusConfig(dataset_path=str(CHAT), messages_column="messages"),
    ]
    [batch] = opened_chat(corpora=corpora, document_mask=False).loader.load([range(40)], step=0)
    shares = (batch.targets_BS != IGNORE_INDEX).float().mean(dim=1)
    assert (shares == 1).sum() == 20
    assert shares.min() < 0.8


def test_validation_on_conversations(opened_chat: Opener, caplog: pytest.LogCaptureFixture) -> None:
    held_out = opened_chat(ValidationConfig(enable=True), held_out_fraction=0.3).validation
    own = opened_chat(
        ValidationConfig(enable=True, dataset_path=str(CHAT), messages_column="messages")
    ).validation
    for data in (held_out, own):
        assert data is not None
        batches = [batch for [batch] in data.microbatches(0, 1)]
        counted = sum(int((batch.targets_BS != IGNORE_INDEX).sum()) for batch in batches)
        assert 0 < counted < 0.8 * data.num_blocks * SEQ_LEN
    assert "document masks" not in caplog.text
    opened_chat(document_mask=False)
    assert 'set model.attention_mask = "document"' in caplog.text


def test_conversations_without_the_assistant_are_counted(
    opened_chat: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = json.dumps({"messages": [{"role": "user", "content": "Hello?"}]})
    file = tmp_path / "some.jsonl"
    file.write_text(f"{alone}\n{CHAT.read_text()}{alone}\n")
    actual = blocks_of(opened_chat(dataset_path=str(file)))
    assert "2 of 62 conversations have no assistant token and are skipped" in caplog.text
    assert actual == blocks_of(opened_chat())
    file.write_text(f"{alone}\n{alone}\n")
    with pytest.raises(DataError, match="no conversation with an assistant message"):
        opened_chat(dataset_path=str(file))


def test_bad_lines_and_a_missing_template_stop_the_start(
    opened_chat: Opener, tokenizer_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": []}\n' + CHAT.read_text() + "{\n")
    message = r"2 conversations of (?s:.*)bad.jsonl:1: it has no(?s:.*)bad.jsonl:62: not JSON"
    with pytest.raises(DataError, match=message):
        opened_chat(dataset_path=str(file))
    with pytest.raises(DataError, match=message):
        opened_chat(dataset_path=str(file), hf_assets_path=None)
    with pytest.raises(DataError, match="has no chat template"):
        opened_chat(hf_assets_path=str(tokenizer_folder), vocab_size=300)


def test_without_a_tokenizer_one_with_turn_tokens_is_trained(opened_chat: Opener) -> None:
    data = opened_chat(hf_assets_path=None, vocab_size=300)
    folder = data.tokenizer_files.folder
    assert (folder / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE
    eos = data.tokenizer().eos_id
    targets = [target for row in blocks_of(data).values() for target in row]
    assert targets.count(eos or -1) > 50
    with pytest.raises(DataError, match="5 special tokens need 261"):
        opened_chat(hf_assets_path=None, vocab_size=260)


def run_of_conversations(pool: WorkerPool, folder: Path, **overrides: Any) -> list[Outcome]:
    settings = {
        "training.dataset_path": str(CHAT),
        "training.messages_column": "messages",
        "training.steps": 3,
    }
    return pool.run(run_job, folder / "run", settings | overrides)


def test_one_process_and_two_train_equally(
    pools: Callable[[int], WorkerPool], tmp_path: Path, opened: Opener
) -> None:
    [alone] = run_of_conversations(pools(1), tmp_path / "a")
    two = run_of_conversations(pools(2), tmp_path / "b")
    by_step = [sorted(a + b) for a, b in zip(*(one.samples for one in two), strict=True)]
    assert by_step == [sorted(samples) for samples in alone.samples]
    assert two[0].targets == two[1].targets == alone.targets
    assert two[0].losses == pytest.approx(alone.losses, rel=1e-9)
    assert alone.losses[-1] < alone.losses[0]
    # Each sample is a microbatch, and some of them have no target.
    data = opened(
        dataset_path=str(CHAT), messages_column="messages", seq_len=24, seed=0,
        hf_assets_path=None, vocab_size=517,
    )  # fmt: skip
    [batch] = data.loader.load([range(24)], step=0)
    targets = (batch.targets_BS != IGNORE_INDEX).sum(dim=1)
    assert targets.reshape(3, 8).sum(dim=1).tolist() == alone.targets
    assert (targets == 0).any()


def test_plain_templates_train_too(opened_chat: Opener, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "chatml", CHATML)
    targets = [
        t for row in blocks_of(opened_chat(hf_assets_path=str(folder))).values() for t in row
    ]
    assert IGNORE_INDEX in targets and len(set(targets)) > 50
