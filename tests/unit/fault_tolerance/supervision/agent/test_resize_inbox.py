"""Requests of one machine end with a final answer, and with the agent."""

import threading
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.agent.resize_inbox import ResizeInbox
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    ResizeState,
    RunMesh,
)


class _Inbox:
    """An inbox with the same request at each look, whose storage answers when it may."""

    def __init__(self) -> None:
        self.request = ResizeRequest(mesh=RunMesh(2))
        self.answers: list[ResizeState] = []
        self.num_looks = 0
        self.may_answer = threading.Event()

    def poll(self, now_s: float) -> ResizeRequest:
        self.num_looks += 1
        return self.request

    def answer(self, request: ResizeRequest, state: ResizeState, reason: str = "") -> None:
        assert self.may_answer.wait(10)
        self.answers.append(state)

    def repeat(self, now_s: float) -> None: ...


def _resize_inbox(inbox: _Inbox) -> ResizeInbox:
    untyped: Any = inbox
    return ResizeInbox(untyped, lambda request: None, check_arguments=lambda arguments: None)


def test_a_final_answer_ends_a_request() -> None:
    inbox = _Inbox()
    inbox.may_answer.set()
    box = _resize_inbox(inbox)
    box.is_open = True
    box._receive()
    assert box.request is not None
    box.answer(ResizeState.READY)
    assert box.request is not None
    box.answer(ResizeState.DONE)
    assert box.request is None


def test_a_closed_inbox_receives_nothing() -> None:
    inbox = _Inbox()
    box = _resize_inbox(inbox)
    box.is_open = True
    box.close("the run has ended")
    box._receive()
    assert inbox.num_looks == 0 and box.request is None


def test_the_request_is_answered_before_the_agent_ends() -> None:
    inbox = _Inbox()
    box = _resize_inbox(inbox)
    box.request = inbox.request
    box.start()
    join = box._thread.join

    def end(timeout_s: float) -> None:
        inbox.may_answer.set()
        join(timeout_s)

    box._thread.join = end  # pyright: ignore[reportAttributeAccessIssue]
    box.close("the run has ended")
    answers = list(inbox.answers)
    inbox.may_answer.set()
    assert answers == [ResizeState.FAILED]
