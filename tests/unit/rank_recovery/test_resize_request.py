"""Requests and answers pass through files; what is not a request changes nothing."""

import json
from pathlib import Path

import pytest

from torchtitan_lite.rank_recovery.resize_request import (
    Answer,
    Outcome,
    RequestInbox,
    ResizeRequest,
    read_answer,
    send_request,
    withdraw_request,
)


def test_a_request_is_read_once_and_answered(tmp_path: Path) -> None:
    inbox = RequestInbox(tmp_path)
    request = ResizeRequest(num_ranks=2, arguments=("--parallelism.tensor_parallel_degree=2",))
    assert inbox.poll(0.0) is None
    send_request(tmp_path, request)
    assert inbox.poll(0.1) is None, "it is polled too often"
    assert inbox.poll(1.0) == request and inbox.poll(2.0) is None
    assert read_answer(tmp_path, request) is None
    inbox.answer(request, Outcome.REJECTED, "why")
    assert read_answer(tmp_path, request) == Answer(
        id=request.id, outcome=Outcome.REJECTED, reason="why"
    )
    assert read_answer(tmp_path, ResizeRequest(num_ranks=2)) is None
    assert str(request) == "2 ranks --parallelism.tensor_parallel_degree=2"


def test_an_agent_does_not_follow_a_request_to_an_earlier_one(tmp_path: Path) -> None:
    request = ResizeRequest(num_ranks=2)
    send_request(tmp_path, request)
    RequestInbox(tmp_path).answer(request, Outcome.DONE)
    inbox = RequestInbox(tmp_path)
    assert inbox.poll(0.0) is None and read_answer(tmp_path, request) is None
    send_request(tmp_path, request)
    withdraw_request(tmp_path)
    assert inbox.poll(1.0) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"num_ranks": 2}',
        json.dumps({"num_ranks": "2", "arguments": [], "id": "a"}).encode(),
        json.dumps({"num_ranks": True, "arguments": [], "id": "a"}).encode(),
        json.dumps({"num_ranks": 0, "arguments": [], "id": "a"}).encode(),
        json.dumps({"num_ranks": 2, "arguments": ["x"], "id": "a" * 70_000}).encode(),
    ],
)
def test_a_malformed_request_is_removed(content: bytes, tmp_path: Path) -> None:
    inbox = RequestInbox(tmp_path)
    path = tmp_path / "resize.json"
    path.write_bytes(content)
    assert inbox.poll(0.0) is None and not path.exists()
    answer = tmp_path / "resize_answer.json"
    answer.write_bytes(content)
    assert read_answer(tmp_path, ResizeRequest(num_ranks=2)) is None
