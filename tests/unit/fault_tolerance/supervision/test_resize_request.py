"""Requests and answers pass through files; what is not a request changes nothing."""

import json
import os
import time
from pathlib import Path

import pytest

from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeAnswer,
    ResizeRequest,
    ResizeState,
    RunMesh,
    read_answer,
    send_request,
    withdraw_request,
)


def test_a_request_is_read_once_and_answered(tmp_path: Path) -> None:
    inbox = RequestInbox(tmp_path)
    request = ResizeRequest(mesh=RunMesh(2, ("--parallelism.tensor_parallel_degree=2",)))
    assert inbox.poll(0.0) is None
    send_request(tmp_path, request)
    assert inbox.poll(0.1) is None, "it is polled too often"
    assert inbox.poll(1.0) == request and inbox.poll(2.0) is None
    assert read_answer(tmp_path, request) is None
    inbox.answer(request, ResizeState.REJECTED, "why")
    assert read_answer(tmp_path, request) == ResizeAnswer(
        id=request.id, state=ResizeState.REJECTED, reason="why"
    )
    assert read_answer(tmp_path, ResizeRequest(mesh=RunMesh(2))) is None
    assert str(request.mesh) == "2 ranks --parallelism.tensor_parallel_degree=2"
    for mesh in (RunMesh(1), request.mesh):
        assert RunMesh.from_text(mesh.to_text()) == mesh


def test_an_agent_does_not_follow_a_request_to_an_earlier_one(tmp_path: Path) -> None:
    request = ResizeRequest(mesh=RunMesh(2))
    send_request(tmp_path, request)
    RequestInbox(tmp_path).answer(request, ResizeState.DONE)
    inbox = RequestInbox(tmp_path)
    assert inbox.poll(0.0) is None
    send_request(tmp_path, request)
    withdraw_request(tmp_path)
    assert inbox.poll(1.0) is None


def test_one_of_the_machines_that_share_a_folder_has_a_request(tmp_path: Path) -> None:
    inboxes = [RequestInbox(tmp_path, is_shared=True) for _ in range(3)]
    request = ResizeRequest(mesh=RunMesh(2))
    send_request(tmp_path, request)
    # A machine that joins now leaves it to the others.
    inboxes.append(RequestInbox(tmp_path, is_shared=True))
    found = [inbox.poll(0.0) for inbox in inboxes]
    assert [one for one in found if one is not None] == [request]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_removes_a_request_that_nobody_waits_for(tmp_path: Path) -> None:
    send_request(tmp_path, ResizeRequest(mesh=RunMesh(2)))
    (file,) = tmp_path.iterdir()
    long_ago_s = time.time() - 60
    os.utime(file, (long_ago_s, long_ago_s))
    assert RequestInbox(tmp_path, is_shared=True).poll(0.0) is None


def _request(*, num_ranks: object = 2, arguments: object = ()) -> bytes:
    mesh = {"num_ranks": num_ranks, "arguments": arguments}
    return json.dumps({"mesh": mesh, "id": "a"}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"mesh": {"num_ranks": 2}}',
        _request(num_ranks="2"),
        _request(num_ranks=True),
        _request(num_ranks=0),
        _request(arguments=["x" * 70_000]),
    ],
)
def test_a_malformed_request_is_removed(content: bytes, tmp_path: Path) -> None:
    inbox = RequestInbox(tmp_path)
    path = tmp_path / "resize.json"
    path.write_bytes(content)
    assert inbox.poll(0.0) is None and not path.exists()
    (tmp_path / "resize_answer.json").write_bytes(content)
    assert read_answer(tmp_path, ResizeRequest(mesh=RunMesh(2))) is None
