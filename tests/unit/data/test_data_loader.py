"""The loader and the validation set, opened from a config on real files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import OpenedData, microbatch_indices
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch

FIXTURE = Path(__file__).parents[2] / "assets" / "fixture.jsonl"
Opener = Callable[..., OpenedData]


def same(a: list[Microbatch], b: list[Microbatch]) -> bool:
    return len(a) == len(b) and all(
        x.samples == y.samples
        and torch.equal(x.tokens_BS, y.tokens_BS)
        and torch.equal(x.targets_BS, y.targets_BS)
        and torch.equal(x.rng_keys_B, y.rng_keys_B)
        for x, y in zip(a, b, strict=True)
    )


def rows(microbatches: list[Microbatch]) -> dict[int, tuple]:
    """Return all contents of each sample, by its index."""
    return {
        sample: (m.tokens_BS[i].tolist(), m.targets_BS[i].tolist(), int(m.rng_keys_B[i]))
        for m in microbatches
        for i, sample in enumerate(m.samples)
    }


def test_a_microbatch(opened: Opener) -> None:
    data = opened()
    [batch] = data.loader.load([range(40)], step=0)
    assert batch.documents_BS is not None
    assert batch.tokens_BS.shape == batch.targets_BS.shape == (40, 17)
    assert {batch.tokens_BS.dtype, batch.rng_keys_B.dtype} == {torch.int64}
    assert batch.positions_BS[3].tolist() == list(range(17))
    border = batch.documents_BS[:, 1:] != batch.documents_BS[:, :-1]
    assert border.any()
    inner = batch.targets_BS[:, :-1]
    assert (inner[border] == IGNORE_INDEX).all()
    assert torch.equal(inner[~border], batch.tokens_BS[:, 1:][~border])
    assert len(set(batch.rng_keys_B.tolist())) == 40

    [plain] = opened(document_mask=False).loader.load([range(40)], step=0)
    assert plain.documents_BS is None
    assert torch.equal(plain.targets_BS[:, :-1], plain.tokens_BS[:, 1:])


def test_a_shuffled_stream_has_one_order_on_any_number_of_ranks(opened: Opener) -> None:
    """The blocks of one window, read by one rank, by three ranks, and from a resumed state."""
    stream = {"streaming": True, "shuffle_window": 24}
    whole = rows(opened(**stream).loader.load([range(60)], step=0))
    in_order = rows(opened(streaming=True).loader.load([range(72)], step=0))
    for first in (0, 24):
        shuffled = [whole[sample][0] for sample in range(first, first + 24)]
        streamed = [in_order[sample][0] for sample in range(first, first + 24)]
        assert shuffled != streamed and sorted(shuffled) == sorted(streamed)
    for rank in range(3):
        loader = opened(**stream).loader
        for step, first in enumerate(range(0, 60, 12)):
            [samples] = microbatch_indices(range(first, first + 12), 4, rank, 3)
            for sample, contents in rows(loader.load([samples], step=step)).items():
                assert contents[:2] == whole[sample][:2]
    for cursor in (12, 30, 47, 48):
        first = opened(**stream).loader
        first.load([range(max(0, cursor - 12), cursor)], step=0)
        resumed = opened(**stream).loader
        resumed.load_state(json.loads(json.dumps(first.state(cursor))))
        found = rows(resumed.load([range(cursor, 60)], step=0))
        assert {one: found[one][:2] for one in found} == {one: whole[one][:2] for one in found}


def test_another_window_is_another_order(opened: Opener) -> None:
    state = opened(streaming=True, shuffle_window=24).loader.state(0)
    with pytest.raises(DataError, match="had shuffle_window 24, now 8"):
        opened(streaming=True, shuffle_window=8).loader.load_state(state)
    with pytest.raises(DataError, match="had shuffle_window 24, now None"):
        opened(streaming=True).loader.load_state(state)


def test_workers_that_tokenize_change_nothing(opened: Opener) -> None:
    settings = {"streaming": True, "held_out_fraction": 0.2, "shuffle_window": 8}
    workers = {"dataloader": {"num_workers": 3}}
    alone, shared = opened(**settings).loader, opened(**settings, **workers).loader
    for first in range(0, 600, 200):
        samples = range(first, first + 200)
        assert same(alone.load([samples], step=0), shared.load([samples], step=0))
        assert alone.state(first + 200) == shared.state(first + 200)


def test_a_killed_worker_is_replaced(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    workers = {"dataloader": {"num_workers": 2}}
    alone, shared = opened(streaming=True).loader, opened(streaming=True, **workers).loader
    assert same(alone.load([range(40)], step=0), shared.load([range(40)], step=0))
    children = psutil.Process().children()
    victims = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(victims) == 2
    # They start in half a second, and without torch's memory.
    files = {Path(used.path).name for child in victims for used in child.memory_maps()}
    assert not [name for name in files if name.startswith("libtorch")]
    victims[0].kill()
    # More than what the workers have tokenized ahead.
    assert same(alone.load([range(40, 800)], step=0), shared.load([range(40, 800)], step=0))
    assert "it is replaced" in caplog.text


def test_keys_follow_the_step_and_the_sample(opened: Opener) -> None:
    loader = opened().loader
    [a] = loader.load([[4, 5]], step=1)
    [b] = loader.load([[5, 4]], step=1)
    [c] = loader.load([[4, 5]], step=2)
    assert a.rng_keys_B.tolist() == b.rng_keys_B.tolist()[::-1]
    assert not set(a.rng_keys_B.tolist()) & set(c.rng_keys_B.tolist())


@pytest.mark.parametrize("streaming", [False, True])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(
    opened: Opener, streaming: bool
) -> None:
    steps: list[list[dict]] = []
    for num_ranks in (1, 2, 4):
        loaders = [opened(streaming=streaming).loader for _ in range(num_ranks)]
        run = []
        for step in range(5):
            used: dict[int, tuple] = {}
            for rank, loader in enumerate(loaders):
                used |= rows(
                    loader.load(
                        microbatch_indices(range(step * 8, step * 8 + 8), 2, rank, num_ranks), step
                    )
                )
            run.append(used)
        steps.append(run)
    assert [sorted(used) for used in steps[0]] == [list(range(8 * s, 8 * s + 8)) for s in range(5)]
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_prefetch_changes_nothing(opened: Opener, streaming: bool) -> None:
    plain, ahead = opened(streaming=streaming).loader, opened(streaming=streaming).loader
    for step in range(6):
        request = microbatch_indices(range(8 * step, 8 * step + 8), 2, 1, 2)
        expected = plain.load(request, step)
        assert same(ahead.load(request, step), expected)
        ahead.prefetch(microbatch_indices(range(8 * step + 8, 8 * step + 16), 2, 1, 2), step + 1)
        if step == 3:  # the step is repeated, and another rank's samples are taken over
            assert same(ahead.load(request, step), expected)
            other = microbatch_indices(range(8 * step, 8 * step + 8), 2, 0, 2)
            assert same(ahead.load(other, step), plain.load(other, step))


def blend(tmp_path: Path) -> list[CorpusConfig]:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"other {i} " * 9}) + "\n" for i in range(50)))
    return [
        CorpusConfig(dataset_path=str(FIXTURE), weight=0.7),
        CorpusConfig(dataset_path=str(other), streaming=True, weight=0.3),
    ]


def test_a_resumed_blend_equals_an_uninterrupted_one(opened: Opener, tmp_path: Path) -> None:
    settings = {"corpora": blend(tmp_path)}
    uninterrupted = opened(**settings).loader
    expected, states = {}, {}
    for step in range(60):
        expected[step] = uninterrupted.load([range(step * 6, step * 6 + 6)], step)
        states[step + 1] = json.dumps(uninterrupted.state(step * 6 + 6))
    for step in (1, 17, 40):
        resumed = opened(**settings).loader
        resumed.load_state(json.loads(states[step]))
        for later in range(step, 60):
            assert same(resumed.load([range(later * 6, later * 6 + 6)], later), expected[later])


def test_the_state_is_the_same_on_every_rank(opened: Opener, tmp_path: Path) -> None:
    settings = {"corpora": blend(tmp_path)}
    loaders = [opened(**settings).loader for _ in range(2)]
    for step in range(20):
        for rank, loader in enumerate(loaders):
            loader.load(microbatch_indices(range(step * 4, step * 4 + 4), 2, rank, 2), step)
        assert loaders[0].state(step * 4 + 4) == loaders[1].state(step * 4 + 4)


def test_data_that_differ_from_the_checkpoint_are_rejected(opened: Opener, tmp_path: Path) -> None:
    state = opened().loader.state(0)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(FIXTURE.read_bytes())
    opened(dataset_path=str(moved)).loader.load_state(state)
    with pytest.raises(DataError, match="seq_len 17, now 18"):
        opened(seq_len=18).loader.load_state(state)
    with pytest.raises(DataError, match="debug.seed was 7, now 8"):
        opened(seed=8).loader.load_state(state)
    with pytest.raises(DataError, match="1 corpora, now 2"):
        opened(corpora=blend(tmp_path)).loader.load_state(state)
    with pytest.raises(DataError, match="digest"):
        moved.write_text(FIXTURE.read_text().replace("honey", "money"))
        opened(dataset_path=str(moved)).loader.load_state(state)


def test_fillers_have_no_targets(opened: Opener) -> None:
    loader = opened().loader
    [batch] = loader.load([[-1, 3]], step=0)
    [alone] = loader.load([[3]], step=0)
    assert (batch.targets_BS[0] == IGNORE_INDEX).all()
    assert torch.equal(batch.targets_BS[1], alone.targets_BS[0])


def test_errors_of_the_background_thread_are_raised(opened: Opener, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": ""}\n')
    loader = opened(dataset_path=str(bad), streaming=True).loader
    loader.prefetch([[0]], 0)
    with pytest.raises(DataError, match="no text"):
        loader.load([[0]], 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_validation_uses_each_held_out_block_once(opened: Opener, num_ranks: int) -> None:
    validation = ValidationConfig(enable=True, local_batch_size=3)
    data = opened(validation, held_out_fraction=0.3).validation
    assert data is not None
    rounds = [list(data.microbatches(rank, num_ranks)) for rank in range(num_ranks)]
    assert {len(r) for r in rounds} == {data.num_rounds(num_ranks)}
    batches = [batch for r in rounds for [batch] in r]
    assert {batch.tokens_BS.shape for batch in batches} == {(3, 17)}
    samples = [i for batch in batches for i in batch.samples if i >= 0]
    assert sorted(samples) == list(range(data.num_blocks))
    again = [list(data.microbatches(rank, num_ranks)) for rank in range(num_ranks)]
    for first, second in zip(rounds, again, strict=True):
        assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_validation_steps_spread_over_the_corpora(opened: Opener, tmp_path: Path) -> None:
    corpora = [corpus.model_copy(update={"streaming": False}) for corpus in blend(tmp_path)]
    validation = ValidationConfig(enable=True, local_batch_size=2, steps=3)
    data = opened(validation, corpora=corpora, held_out_fraction=0.3).validation
    assert data is not None
    samples = [i for [batch] in data.microbatches(0, 1) for i in batch.samples]
    assert len(samples) == 6
    assert np.diff(samples).max() - np.diff(samples).min() <= 1
    assert max(samples) > data.num_blocks // 2


def test_validation_on_a_set_of_its_own(opened: Opener, tmp_path: Path) -> None:
    other = tmp_path / "valid.jsonl"
    other.write_text(json.dumps({"text": "only this " * 20}) + "\n")
    validation = ValidationConfig(enable=True, dataset_path=str(other), seq_len=9)
    data = opened(validation)
    assert data.validation is not None
    [[batch], *_] = data.validation.microbatches(0, 1)
    text = data.tokenizer().decode(batch.tokens_BS[0].tolist())
    assert "only this ".startswith(text[:10])
    assert batch.tokens_BS.shape == (8, 9)


def test_validation_without_documents_is_rejected(opened: Opener, tmp_path: Path) -> None:
    enabled = ValidationConfig(enable=True)
    with pytest.raises(DataError, match=r"training.held_out_fraction = 0.0. Set it"):
        opened(enabled)
    with pytest.raises(DataError, match=r"held-out part \(0.05 of .* tokens in .* raise training"):
        opened(enabled, held_out_fraction=0.05, seq_len=500)
    with pytest.raises(DataError, match="streaming = true"):
        opened(enabled, held_out_fraction=0.3, streaming=True)


def test_a_tokenizer_too_large_for_the_model_of_a_stream(opened: Opener) -> None:
    with pytest.raises(DataError, match="300 tokens, but the model's vocabulary is 260"):
        opened(streaming=True, vocab_size=260)
