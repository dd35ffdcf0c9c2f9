"""Streams: the same blocks when read in order, after a step back, and from a saved state."""

import itertools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data import node_streams
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.packing import PackedBlocks
from torchtitan_lite.data.stream import StreamedBlocks
from torchtitan_lite.data.stream_reader import BEGINNING, Origin, StreamReader, TokenRun
from torchtitan_lite.data.token_cache import tokenize
from torchtitan_lite.data.tokenization import DocumentTokenizer, _Worker
from torchtitan_lite.data.tokenizer import load_tokenizer

SEQ_LEN = 23


@pytest.fixture(params=["jsonl", "parquet", "text"])
def path(request: pytest.FixtureRequest, tmp_path: Path, documents: list[str]) -> Path:
    """The fixture's documents in three files of different lengths."""
    import datasets

    folder = tmp_path / "stream"
    folder.mkdir()
    for number, part in enumerate([documents[:3], documents[3:36], documents[36:]]):
        if request.param == "parquet":
            table = datasets.Dataset.from_dict({"text": part})
            table.to_parquet(str(folder / f"{number}.parquet"))
        elif request.param == "jsonl":
            lines = (json.dumps({"text": text}) + "\n" for text in part)
            (folder / f"{number}.jsonl").write_text("".join(lines))
        else:
            for place, text in enumerate(part):
                (folder / f"{number}{place:02}.txt").write_text(text)
    return folder


def stream_of(path: Path, tokenizer_folder: Path, cache: Path, fraction: float = 0.0):
    corpus = open_corpus(CorpusConfig(dataset_path=str(path), streaming=True))
    tokenizer = DocumentTokenizer(load_tokenizer(tokenizer_folder))
    reader = StreamReader(corpus, tokenizer, held_out_fraction=fraction)
    return StreamedBlocks(reader, SEQ_LEN)


def packed_table(documents: list[str], tokenizer_folder: Path, epochs: int) -> PackedBlocks:
    ids = tokenize(load_tokenizer(tokenizer_folder), documents * epochs)
    lengths = np.array([len(document) for document in ids])
    return PackedBlocks(np.concatenate(ids), np.cumsum(lengths) - lengths, SEQ_LEN)


def assert_same(a, b) -> None:
    assert a[0].tolist() == b[0].tolist()
    assert a[1].tolist() == b[1].tolist()


def test_stream_matches_the_table_over_epochs_and_resumes_anywhere(
    path: Path, tokenizer_folder: Path, documents: list[str], tmp_path: Path
) -> None:
    table = packed_table(documents, tokenizer_folder, epochs=3)
    stream = stream_of(path, tokenizer_folder, tmp_path)
    num_blocks = table.num_blocks - 8
    states = {}
    for first in range(0, num_blocks, 4):
        blocks = np.arange(first, first + 4)
        assert_same(stream.read(blocks), table.read(blocks))
        assert_same(stream.read(blocks), table.read(blocks))
        states[first + 4] = json.dumps(stream.state(first + 4))
    assert len(states) > 60
    for block in list(states)[::9]:
        resumed = stream_of(path, tokenizer_folder, tmp_path)
        resumed.load_state(json.loads(states[block]))
        assert json.dumps(resumed.state(block)) == states[block]
        blocks = np.arange(block, min(block + 30, num_blocks))
        assert_same(resumed.read(blocks), table.read(blocks))
    state = json.loads(states[max(states)])
    assert state["epoch"] == 2 and state["position"] > 0


def test_blocks_of_one_rank_and_steps_back(
    tokenizer_folder: Path, documents: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    table = packed_table(documents, tokenizer_folder, epochs=6)
    stream = stream_of(file, tokenizer_folder, tmp_path)
    for first in [3, 11, 19, 11, 0, 400, 396, 2]:
        blocks = np.array([first, first + 1, first + 4])
        assert_same(stream.read(blocks), table.read(blocks))
    # Far before a saved state, the stream must be read from its beginning.
    state = stream.state(300)
    resumed = stream_of(file, tokenizer_folder, tmp_path)
    resumed.load_state(state)
    for first in [300, 5]:
        assert_same(resumed.read(np.array([first])), table.read(np.array([first])))


def test_held_out_documents_are_excluded(
    tokenizer_folder: Path, documents: list[str], tmp_path: Path
) -> None:
    from torchtitan_lite.data.token_cache import is_held_out

    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    kept = [text for text in documents if not is_held_out(text, 0.3)]
    assert len(kept) < len(documents)
    table = packed_table(kept, tokenizer_folder, epochs=2)
    stream = stream_of(file, tokenizer_folder, tmp_path, fraction=0.3)
    blocks = np.arange(table.num_blocks)
    assert_same(stream.read(blocks), table.read(blocks))


def test_a_stream_without_text_is_rejected(tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="has no text to train on"):
        stream_of(file, tokenizer_folder, tmp_path).read(np.array([0]))


def test_repeating_a_step_or_taking_over_samples_does_not_read_again(
    tokenizer_folder: Path,
    documents: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents * 20))
    stream = stream_of(file, tokenizer_folder, tmp_path)
    for _ in range(2):
        stream.read(np.arange(400))
    for first in range(400, 2000, 400):
        own, other = np.arange(first + 200, first + 400), np.arange(first, first + 200)
        ahead = own + 400
        for blocks in (own, ahead, own, other):
            stream.read(blocks)
        stream.state(first + 400)
    assert "going back" not in caplog.text
    stream.read(np.array([0]))
    assert "going back" in caplog.text


def test_a_killed_worker_has_ended_before_its_pipe_is_closed() -> None:
    log: list[str] = []

    def logged(name: str) -> Any:
        return lambda: log.append(name)

    worker: Any = object.__new__(_Worker)
    worker._process = SimpleNamespace(kill=logged("kill"), join=logged("join"))
    worker._pipe = SimpleNamespace(close=logged("close"))
    worker.kill()
    assert log == ["kill", "join", "close"]


def test_a_stream_holds_what_recent_blocks_need_and_nothing_before() -> None:
    def run(start: int) -> Any:
        return SimpleNamespace(end=start + 10, origin=SimpleNamespace(position=start))

    stream: Any = object.__new__(StreamedBlocks)
    stream._runs, stream._recent_firsts = deque(), deque()
    stream._following = map(run, range(0, 1000, 10))
    stream._start, stream._window_tokens = SimpleNamespace(position=0), 10
    stream._cover(55, 65)
    assert [one.origin.position for one in stream._runs] == [50, 60]
    # Once blocks were read, those before them may be read again.
    stream._recent_firsts.append(50)
    stream._cover(85, 95)
    assert [one.origin.position for one in stream._runs] == [50, 60, 70, 80, 90]
    stream._restart = lambda origin: None
    stream.load_state(BEGINNING.values())
    assert not stream._recent_firsts


def test_runs_that_no_rank_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_streams, "_MAX_HELD_TOKENS", 25)
    shared: Any = object.__new__(node_streams._SharedStream)
    shared._held, shared._num_held_tokens, shared._num_ranks = {}, 0, 2
    shared._read = lambda origin: SimpleNamespace(tokens=[0] * 10)
    for position in range(4):
        shared.take(SimpleNamespace(position=position), rank=0)
    assert list(shared._held) == [2, 3] and shared._num_held_tokens == 20


class _Runs:
    """Runs of `length` tokens, each of one document. The tokens are their positions."""

    name = "numbers"

    def __init__(self, length: int) -> None:
        self.length = length
        self.starts: list[int] = []
        """Positions from which the stream was read."""

    def runs(self, origin: Origin) -> Iterator[TokenRun]:
        self.starts.append(origin.position)
        for first in itertools.count(origin.position, self.length):
            yield TokenRun(
                origin=Origin(position=first, epoch=0, dataset_state={}),
                following=Origin(position=first + self.length, epoch=0, dataset_state={}),
                tokens=np.arange(first, first + self.length, dtype=np.uint32),
                document_starts=np.array([first]),
            )

    def close(self) -> None: ...


@pytest.mark.parametrize("length", [1, 5, 6, 11, 12, 13, 40])
def test_blocks_do_not_depend_on_where_runs_end(length: int) -> None:
    runs, seq_len = _Runs(length), 6
    stream = StreamedBlocks(runs, seq_len)
    for first in range(0, 12, 2):
        found = stream.read(np.arange(first, first + 2))
        starts = np.array([first, first + 1])[:, None] * seq_len
        places = starts + np.arange(seq_len + 1)
        assert found.tokens.tolist() == places.tolist()
        owners = places // length
        assert found.documents.tolist() == (owners - owners[:, :1]).tolist()
        # The run with the first token of the next block.
        position = stream.state(first + 2)["position"]
        assert position <= (first + 2) * seq_len < position + length
    assert runs.starts == [0]


def test_a_step_back_reads_from_the_loaded_position_if_that_is_enough() -> None:
    runs = _Runs(6)
    stream = StreamedBlocks(runs, 6)
    stream.load_state(Origin(position=60, epoch=0, dataset_state={}).values())
    stream.read(np.array([30]))
    for block, start in ((10, 60), (9, 0)):
        assert stream.read(np.array([block])).tokens[0, 0] == 6 * block
        assert runs.starts[-1] == start
