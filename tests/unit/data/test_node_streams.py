"""Streams that one rank reads for all ranks of a node."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.harness.launch import wait_until
from tests.harness.ranks import FORK_SERVER
from tests.harness.threads import run_on_threads
from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.config.tables.validation import ValidationConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.registry import REGISTRY, Dataset
from torchtitan_lite.data import DataLoader, OpenedData, microbatch_indices, open_data
from torchtitan_lite.data import node_streams as module
from torchtitan_lite.data.node_streams import StreamClient, StreamServer
from torchtitan_lite.data.stream_reader import Origin, TokenRun

Opener = Callable[..., OpenedData]
Node = list[StreamServer | StreamClient]


def listener_on(address: str, num_ranks: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(num_ranks)
    return listener


@pytest.fixture
def address() -> str:
    return f"\0test-{secrets.token_hex(8)}"


@pytest.fixture
def node_of(address: str) -> Iterator[Callable[[int], Node]]:
    """A function that returns the ends of the ranks of a node, the reading one first."""
    with ExitStack() as stack:

        def make(num_ranks: int) -> Node:
            server = StreamServer(listener_on(address, num_ranks), num_ranks)
            ends: Node = [server, *(StreamClient(address) for _ in range(num_ranks - 1))]
            for end in ends:
                stack.enter_context(end)
            return ends

        yield make


def rows(loader: DataLoader, samples: Sequence[int], step: int = 0) -> dict[int, list[int]]:
    """Return the tokens of each sample."""
    [batch] = loader.load([samples], step)
    return dict(zip(batch.samples, batch.tokens_BS.tolist(), strict=True))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, documents: list[str]) -> list[int]:
    """The documents that were read of the registered data set "counted", by number."""
    numbers: list[int] = []

    def counted() -> Iterator[str]:
        for number, text in enumerate(documents):
            numbers.append(number)
            yield text

    monkeypatch.setitem(REGISTRY.datasets, "counted", Dataset(documents=counted, version="1"))
    return numbers


@pytest.mark.parametrize("num_workers", [0, 2])
def test_four_ranks_read_a_stream_once(
    opened: Opener, node_of: Callable[[int], Node], reads: list[int], num_workers: int
) -> None:
    corpus = {"dataset": "counted", "streaming": True, "shuffle_window": 8, "weight": 0.7}
    settings: dict[str, Any] = {"corpora": [corpus, {**corpus, "weight": 0.3}]}
    alone = opened(**settings).loader
    expected = rows(alone, range(320))
    state = alone.state(320)
    num_reads = len(reads)
    reads.clear()
    workers = {"dataloader": {"num_workers": num_workers}}
    loaders = [opened(**settings, **workers, node=end).loader for end in node_of(4)]
    found: dict[int, list[int]] = {}
    for step, first in enumerate(range(0, 320, 32)):
        for rank, loader in enumerate(loaders):
            [samples] = microbatch_indices(range(first, first + 32), 8, rank, 4)
            found |= rows(loader, samples, step)
    assert found == expected
    assert [json.dumps(loader.state(320)) for loader in loaders] == [json.dumps(state)] * 4
    # As many as one rank reads, of which each corpus reads ahead.
    assert len(reads) <= num_reads + 2 * 32 * (1 + num_workers)
    assert len(reads) > 2 * 32
    resumed = opened(**settings, node=None).loader
    resumed.load_state(json.loads(json.dumps(state)))
    assert rows(resumed, range(320, 330)) == rows(loaders[3], range(320, 330))


def test_ranks_that_read_at_the_same_time(opened: Opener, node_of: Callable[[int], Node]) -> None:
    expected = rows(opened(streaming=True).loader, range(400))
    loaders = [opened(streaming=True, node=end).loader for end in node_of(4)]
    found: list[dict[int, list[int]]] = [{} for _ in loaders]

    def read(rank: int) -> None:
        for step, first in enumerate(range(0, 400, 40)):
            found[rank] |= rows(loaders[rank], range(first, first + 40), step)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_runs_are_held_until_all_ranks_have_taken_them(
    opened: Opener, node_of: Callable[[int], Node]
) -> None:
    server, client, idle = node_of(3)
    loaders = [opened(streaming=True, node=end).loader for end in (server, client, idle)]
    assert isinstance(server, StreamServer)
    [stream] = server._streams
    for loader in loaders[:2]:
        rows(loader, range(200))
    assert stream._num_held_tokens >= 200 * 17
    rows(loaders[2], range(200))
    assert stream._num_held_tokens == 0


def test_runs_are_not_held_for_a_rank_that_has_left(
    opened: Opener, node_of: Callable[[int], Node]
) -> None:
    server, client, leaving = node_of(3)
    loaders = [opened(streaming=True, node=end).loader for end in (server, client, leaving)]
    assert isinstance(server, StreamServer)
    [stream] = server._streams
    for loader, num_samples in zip(loaders, (900, 900, 1), strict=True):
        rows(loader, range(num_samples))
    assert stream._num_held_tokens > 0
    leaving.stop()
    wait_until(lambda: stream._num_held_tokens == 0, 10)


@pytest.mark.parametrize("max_held_tokens", [0, 1000])
def test_a_rank_that_lags_behind_what_is_held_reads_again(
    opened: Opener,
    node_of: Callable[[int], Node],
    monkeypatch: pytest.MonkeyPatch,
    max_held_tokens: int,
) -> None:
    monkeypatch.setattr(module, "_MAX_HELD_TOKENS", max_held_tokens)
    expected = rows(opened(streaming=True).loader, range(300))
    loaders = [opened(streaming=True, node=end).loader for end in node_of(3)]
    for loader in loaders:
        for first in (0, 200, 100):
            samples = range(first, first + 100)
            assert rows(loader, samples) == {one: expected[one] for one in samples}


def test_ranks_that_go_back_do_so_together(opened: Opener, node_of: Callable[[int], Node]) -> None:
    loaders = [opened(streaming=True, node=end).loader for end in node_of(2)]
    alone = opened(streaming=True).loader
    first, far, state = rows(alone, range(40)), rows(alone, range(900, 940)), alone.state(900)
    for samples, expected in ((range(40), first), (range(900, 940), far), (range(40), first)):
        assert [rows(loader, samples) for loader in loaders] == [expected] * 2
    for loader in loaders:
        loader.load_state(json.loads(json.dumps(state)))
    assert [rows(loader, range(900, 940)) for loader in loaders] == [far] * 2


def test_an_error_of_the_stream_is_raised_on_every_rank(
    opened: Opener, node_of: Callable[[int], Node], tmp_path: Path
) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in ("text", 3)))
    settings = {"dataset_path": str(path), "streaming": True}
    messages = []
    for end in (None, *node_of(2)):
        with pytest.raises(DataError) as raised:
            rows(opened(**settings, node=end).loader, range(4))
        messages.append(str(raised.value))
    assert messages == [messages[0]] * 3


def read_for_others(address: str, config: DataConfig, options: dict[str, Any]) -> None:
    """Be the reading rank of two until killed."""
    with StreamServer(listener_on(address, 2), 2) as server:
        open_data(config, ValidationConfig(), **options, node=server)
        threading.Event().wait()


def test_a_rank_reads_for_itself_once_the_reading_rank_is_killed(
    opened: Opener,
    address: str,
    tmp_path: Path,
    tokenizer_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = rows(opened(streaming=True).loader, range(400))
    path = Path(__file__).parents[2] / "assets" / "fixture.jsonl"
    config = DataConfig(
        dataset_path=str(path), streaming=True, seq_len=17, cache_folder=str(tmp_path / "cache")
    )
    options = {"hf_assets_path": str(tokenizer_folder), "vocab_size": 300, "seed": 7}
    options |= {"document_mask": True, "pin_memory": False}
    process = FORK_SERVER.Process(target=read_for_others, args=(address, config, options))
    process.start()
    while address[1:] not in Path("/proc/net/unix").read_text():
        assert process.is_alive()
    with StreamClient(address) as client:
        loader = opened(streaming=True, node=client).loader
        found = rows(loader, range(100))
        assert "gone" not in caplog.text
        process.kill()
        process.join()
        for first in (100, 200, 300):
            found |= rows(loader, range(first, first + 100), first)
        assert found == expected
        assert caplog.text.count("the rank that reads the stream for this node is gone") == 1
        loader.close()


def test_the_reading_rank_serves_the_others_until_they_close(
    opened: Opener, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rows(opened(streaming=True).loader, range(400))
    server = StreamServer(listener_on(address, 2), 2)
    opened(streaming=True, node=server)
    closing = threading.Thread(target=server.__exit__, args=(None, None, None))
    with StreamClient(address) as client:
        loader = opened(streaming=True, node=client).loader
        found = rows(loader, range(10))
        closing.start()
        closing.join(0.1)
        assert found | rows(loader, range(10, 400)) == expected
        loader.close()
    closing.join()
    assert "gone" not in caplog.text


def test_the_reading_rank_ends_when_its_threads_have_ended(
    opened: Opener, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed while it reads for another rank."""
    is_reading, may_read = threading.Event(), threading.Event()
    errors: list[object] = []

    def documents() -> Iterator[str]:
        yield "first"
        is_reading.set()
        may_read.wait(60)
        yield from ["next"] * 100

    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setitem(REGISTRY.datasets, "slow", Dataset(documents=documents, version="1"))
    server = StreamServer(listener_on(address, 2), 2)
    settings = {"corpora": [{"dataset": "slow", "streaming": True}]}
    opened(**settings, node=server)
    with StreamClient(address) as client:
        loader = opened(**settings, node=client).loader
        loader.prefetch([range(8)], 0)
        assert is_reading.wait(60)
        threading.Timer(0.1, may_read.set).start()
        server.__exit__(ValueError, ValueError(), None)
        assert not [one for one in threading.enumerate() if one.name.startswith("streams")]
        client.stop()
        loader.close()
    assert errors == []


def test_a_rank_that_stops_reads_nothing_in_place_of_the_reading_rank(
    opened: Opener, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The reading rank accepts no connection, as if it were hung."""
    with listener_on(address, 2), StreamClient(address) as client:
        loader = opened(streaming=True, node=client).loader
        loader.prefetch([range(8)], 0)
        while client._socket is None:
            pass
        client.stop()
        loader.close()
    assert "gone" not in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_process_of_another_user_receives_nothing(
    opened: Opener, node_of: Callable[[int], Node], address: str
) -> None:
    server, _ = node_of(2)
    opened(streaming=True, node=server)
    code = (
        "import os, socket, sys; os.setuid(65534); end = socket.socket(socket.AF_UNIX);"
        f"end.connect({address!r}); print(end.recv(1))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "b''\n", result.stderr


def test_no_rank_is_accepted_after_the_end(address: str) -> None:
    server = StreamServer(listener_on(address, 2), 2)
    ends: list[bool] = []
    with server:
        join = server._accepting.join

        def joined() -> None:
            join()
            ends.append(server._accepting.is_alive())

        server._accepting.start()
        server._accepting.join = joined  # pyright: ignore[reportAttributeAccessIssue]
    assert ends == [False]


def test_arrays_survive_the_socket() -> None:
    """Integers of a stream beyond 2**32 tokens."""
    start = 2**40
    origin = Origin(position=start, epoch=3, dataset_state={"shard": [1, None]})
    following = Origin(position=start + 3, epoch=3, dataset_state=None)
    run = TokenRun(
        origin=origin,
        following=following,
        tokens=np.array([1, 2**32 - 1, 7], dtype=np.uint32),
        document_starts=np.array([start, start + 2], dtype=np.int64),
    )
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as answers:
        module._send(here, run)
        received = module._receive(answers)
    assert (received.origin, received.following) == (origin, following)
    assert received.tokens.tolist() == run.tokens.tolist()
    assert received.document_starts.tolist() == run.document_starts.tolist()


def test_the_first_rank_of_each_node_reads_for_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks 1 and 3 are on a node, 0 on another one, and 2 on a third.
    monkeypatch.setattr(module, "abstract_socket_scope", lambda: (7, 5, 8, 5)[dist.get_rank()])

    def share() -> str:
        streams = module.share_streams_on_node()
        with streams or nullcontext():
            return type(streams).__name__

    alone = "NoneType"
    assert run_on_threads(4, share) == [alone, "StreamServer", alone, "StreamClient"]
