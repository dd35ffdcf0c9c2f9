"""Transfer of the state from one replica to another: real servers, real sockets."""

import http.client
import itertools
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from tests.harness.launch import wait_until
from tests.unit.checkpoint.conftest import SmallState
from tests.unit.fuzzing import forged_server
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.distributed.rpc import state_client
from torchtitan_lite.distributed.rpc.authentication import ClientSession
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint
from torchtitan_lite.distributed.rpc.state_server import StateServer
from torchtitan_lite.fault_tolerance.replica.healing import client
from torchtitan_lite.fault_tolerance.replica.healing.client import (
    IncompatibleState,
    TornState,
    receive_state,
)
from torchtitan_lite.fault_tolerance.replica.healing.live_state import LiveState
from torchtitan_lite.fault_tolerance.replica.healing.transport import PURPOSE, HealingTransport

_TOKEN = "a secret of all replicas"


class Run(SmallState):
    """A state with a large tensor, in chunks."""

    def __init__(self, seed: int = 0, *, elements: int = 5_000_000) -> None:
        super().__init__(seed)
        draws = torch.Generator().manual_seed(seed)
        self.model["model.large"] = torch.randn(elements, generator=draws)
        self.model["model.turned"] = torch.randn(40, 30, generator=draws).t()
        self.model["model.none"] = torch.empty(0, 4)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not retry answers without a proof."""
    monkeypatch.setattr(state_client, "_UNPROVEN_S", 0.0)


@pytest.fixture
def donor() -> Run:
    run = Run(seed=1)
    run.take_step()
    return run


@pytest.fixture
def server() -> Iterator[StateServer]:
    made = StateServer("127.0.0.1", _TOKEN, PURPOSE)
    yield made
    made.close()


def endpoint(server: StateServer, **changes: Any) -> PeerEndpoint:
    settings = {
        "url": server.url,
        "secret": _TOKEN,
        "purpose": PURPOSE,
        "timeout_s": 30.0,
        "connections": 3,
    }
    return PeerEndpoint(**(settings | changes))


def same(one: Run, other: Run) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


class _Observant(Run):
    """Looks at its tensors, and draws a number, when it loads its values."""

    def load_values(self, values: Any) -> None:
        super().load_values(values)
        self.seen = self.tensors()["model.turned"].clone()
        torch.rand(1)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("connections", [1, 4])
def test_a_state_arrives_complete_and_in_place(
    donor: Run,
    server: StateServer,
    monkeypatch: pytest.MonkeyPatch,
    connections: int,
    is_elsewhere: bool,
) -> None:
    """First the tensors, by way of a copy if they are on another device, then the values and the
    random numbers."""
    if is_elsewhere:
        monkeypatch.setattr(client, "_receive_buffer", torch.empty_like)
    torch.manual_seed(5)
    expected = rng.capture()
    server.offer(8, LiveState.of(donor))
    fresh = _Observant()
    tensor_ranges = {name: tensor.data_ptr() for name, tensor in fresh.tensors().items()}
    torch.manual_seed(6)
    receive_state(endpoint(server, connections=connections), 8, fresh)
    assert same(fresh, donor) and fresh.values() == donor.values()
    assert rng.capture() == expected
    assert torch.equal(fresh.seen, donor.tensors()["model.turned"])
    assert tensor_ranges.items() <= {n: t.data_ptr() for n, t in fresh.tensors().items()}.items()


class _OnDevice(torch.Tensor):
    """A tensor whose memory is not that of the host, as far as its reader knows."""

    device = SimpleNamespace(type="cuda")  # pyright: ignore[reportAssignmentType]


def test_a_range_of_a_state_has_the_bytes_of_the_whole_one() -> None:
    tensors = [torch.arange(3.0), torch.empty(0), torch.arange(4).as_subclass(_OnDevice)]
    state = LiveState(b"header", tensors)
    whole = b"header" + b"".join(one.numpy().tobytes() for one in map(torch.Tensor.cpu, tensors))
    assert state.length == len(whole)
    for start, stop in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        pieces = list(map(bytes, state.read(start, stop)))
        assert b"".join(pieces) == whole[start:stop] and all(pieces)


def test_a_request_before_the_donor_is_notified_waits(donor: Run, server: StateServer) -> None:
    later = threading.Timer(0.3, lambda: server.offer(8, LiveState.of(donor)))
    later.start()
    fresh = Run()
    receive_state(endpoint(server), 8, fresh)
    assert same(fresh, donor)


def test_the_token_is_required(donor: Run, server: StateServer) -> None:
    server.offer(8, LiveState.of(donor))
    fresh, untouched = Run(), Run()
    with pytest.raises(ReplicaError, match="TORCHTITAN_LITE_TOKEN"):
        receive_state(endpoint(server, secret="another one, as long"), 8, fresh)
    assert same(fresh, untouched)


def test_a_state_of_another_progress_is_not_sent(donor: Run, server: StateServer) -> None:
    server.offer(16, LiveState.of(donor))
    with pytest.raises(ReplicaError, match="does not serve this state"):
        receive_state(endpoint(server), 8, Run())
    with pytest.raises(ReplicaError, match="does not serve this state"):
        receive_state(endpoint(server, timeout_s=1.0), 24, Run())


def test_a_state_that_does_not_fit_changes_nothing(server: StateServer) -> None:
    server.offer(8, LiveState.of(Run(seed=1, elements=5_000_008)))
    fresh, untouched = Run(), Run()
    with pytest.raises(IncompatibleState, match=r"model\.large.*same config"):
        receive_state(endpoint(server), 8, fresh)
    assert same(fresh, untouched)


def test_a_state_that_lacks_a_tensor_is_rejected(server: StateServer) -> None:
    donor = Run(seed=1)
    del donor.model["model.wide"]
    server.offer(8, LiveState.of(donor))
    with pytest.raises(IncompatibleState, match="model.wide is missing"):
        receive_state(endpoint(server), 8, Run())


def _die_during_transfer(donor: Run, server: StateServer) -> None:
    state = LiveState.of(donor)
    read = state.read

    def dying(start: int, stop: int) -> Iterator[memoryview]:
        if start > 1 << 20:
            raise ConnectionResetError
        yield from read(start, stop)

    object.__setattr__(state, "read", dying)
    server.offer(8, state)


def test_a_donor_that_dies_during_a_transfer_leaves_a_partial_state(
    donor: Run, server: StateServer
) -> None:
    _die_during_transfer(donor, server)
    with pytest.raises(TornState, match="cannot be read|closed the connection"):
        receive_state(endpoint(server), 8, Run())


def test_a_state_withdrawn_during_a_transfer_is_not_sent(donor: Run, server: StateServer) -> None:
    state = LiveState.of(donor)
    read = state.read

    def withdrawing(start: int, stop: int) -> Iterator[memoryview]:
        yield from read(start, stop)
        if start > 1 << 20:
            server.withdraw()

    object.__setattr__(state, "read", withdrawing)
    server.offer(8, state)
    with pytest.raises(TornState, match="does not serve this state"):
        receive_state(endpoint(server), 8, Run())


def test_bytes_corrupted_in_transfer_are_detected(
    donor: Run, server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(8, LiveState.of(donor))
    received = http.client.HTTPResponse.readinto

    def flipping(self: Any, buffer: memoryview) -> int:
        count = received(self, buffer)
        if count == 1 << 20:
            buffer[12345] ^= 4
        return count

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", flipping)
    with pytest.raises(TornState, match="do not match their MAC"):
        receive_state(endpoint(server), 8, Run())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing of HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345678",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\n\r\n" + b"\x7f" * 8,
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 800000000\r\n\r\n12345678",
    ],
)
def test_a_malformed_response_is_an_error_and_changes_nothing(content: bytes) -> None:
    fresh, untouched = Run(), Run()
    with forged_server() as stranger, pytest.raises(ReplicaError) as caught:
        stranger.answer = content
        url = f"http://127.0.0.1:{stranger.port}"
        receive_state(PeerEndpoint(url, _TOKEN, PURPOSE, 1.0, 2), 8, fresh)
    assert not isinstance(caught.value, TornState)
    assert same(fresh, untouched)


def test_a_missing_server_is_an_error() -> None:
    with pytest.raises(ReplicaError, match="cannot be read"):
        receive_state(PeerEndpoint("http://127.0.0.1:1", _TOKEN, PURPOSE, 1.0, 2), 8, Run())


def test_the_transport_offers_and_records(donor: Run) -> None:
    giving, taking = (HealingTransport(run, "127.0.0.1", _TOKEN) for run in (donor, Run()))
    try:
        limit = timedelta(seconds=30)
        giving.send_checkpoint([1], 8, {}, limit)
        message = taking.recv_checkpoint(0, giving.metadata(), 8, limit)
        assert message["torchft"]["step"] == 8
        assert taking.source is not None and taking.source.progress == 8
        fresh = Run()
        receive_state(PeerEndpoint(taking.source.url, _TOKEN, PURPOSE, 30.0, 2), 8, fresh)
        assert same(fresh, donor)
        giving.disallow_checkpoint()
        with pytest.raises(ReplicaError):
            receive_state(PeerEndpoint(taking.source.url, _TOKEN, PURPOSE, 0.2, 2), 8, fresh)
    finally:
        giving.shutdown()
        taking.shutdown()


def test_the_secret_is_not_sent_to_a_stranger() -> None:
    """Whoever answered as a donor received the token before."""
    with forged_server() as stranger:
        fields = f"X-Ticket: {'00' * 40}\r\nX-Proof: {'00' * 32}\r\nContent-Length: 0"
        stranger.answer = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode()
        url = f"http://127.0.0.1:{stranger.port}"
        with pytest.raises(ReplicaError, match="has another TORCHTITAN_LITE_TOKEN"):
            receive_state(PeerEndpoint(url, _TOKEN, PURPOSE, 5.0, 1), 8, Run())
    assert stranger.received and _TOKEN.encode() not in b"".join(stranger.received)


def test_strangers_take_no_threads_and_block_nobody(donor: Run, server: StateServer) -> None:
    server.offer(8, LiveState.of(donor))
    before = psutil.Process().num_threads()
    address = urlsplit(server.url)
    strangers = [
        socket.create_connection((address.hostname or "", address.port or 0)) for _ in range(200)
    ]
    try:
        for stranger in strangers:
            stranger.sendall(b"GET /state/8 HTTP/1.1\r\n")
        wait_until(lambda: psutil.Process().num_threads() <= before + 40, 30)
        receive_state(endpoint(server), 8, Run())
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_recorded_request_is_rejected(donor: Run, server: StateServer) -> None:
    server.offer(8, LiveState.of(donor))
    sent: list[str] = []

    class Recorded(ClientSession):
        def sign(self, *content: bytes) -> Any:
            proof = super().sign(*content)
            sent.append(str(proof))
            return proof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_client, "ClientSession", Recorded)
        receive_state(endpoint(server), 8, Run())
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    connection.request("GET", "/state/8", headers={"Authorization": sent[0], "Range": "bytes=0-7"})
    assert connection.getresponse().status == HTTPStatus.UNAUTHORIZED
    connection.close()
