"""Which quorum may continue a run: processes of the last one, or anybody after its lease."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.checkpoint import FencingTokens, SupersededError, TokenClaim
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.fault_tolerance.replica import fencing
from torchtitan_lite.fault_tolerance.replica.fencing import Fence

JOIN_TIMEOUT_S = 0.4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_WAIT_S", 0.1)
    # As long as a busy machine may take.
    monkeypatch.setattr(fencing, "_ANSWER_WITHIN_S", 30.0)
    monkeypatch.setattr(fencing, "_POLL_S", 0.01)


class Run:
    """The fences of a run's replicas."""

    def __init__(self, folder: Path) -> None:
        self.tokens = FencingTokens(folder, 0)
        self._fences: list[Fence] = []

    def fence(self, replica: int, tokens: FencingTokens | None = None) -> Fence:
        made = Fence(tokens or FencingTokens(self.tokens.run_folder, replica), JOIN_TIMEOUT_S)
        self._fences.append(made)
        return made

    def admit(
        self,
        fence: Fence,
        members: Sequence[str],
        *,
        own: int = 0,
        lighthouse: str = "first",
        **changes: Any,
    ) -> str:
        """Ask for the quorum of these processes, such as "0:a" for replica 0."""
        ids = [_process(one) for one in members]
        given: dict[str, Any] = {
            "quorum_id": 1,
            "tokens": [fence.token] * len(ids),
        } | changes
        return fence.admit(lighthouse=lighthouse, members=ids, own_id=ids[own], **given)

    def expire(self) -> None:
        """Let the newest lease expire."""
        newest = self.tokens.newest()
        assert newest is not None
        past = time.time() - 2 * fencing.LEASE_S
        os.utime(self.tokens.folder / f"{newest.token:08d}.json", (past, past))

    def close(self) -> None:
        for one in self._fences:
            one.close()


def _process(text: str) -> str:
    number, _, uuid = text.partition(":")
    return f"{quorum_name(int(number))}:f:{uuid}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_all_replicas_of_a_quorum_share_one_claim(run: Run) -> None:
    fences = [run.fence(0), run.fence(1)]
    for number, fence in enumerate(fences):
        assert run.admit(fence, ["0:a", "1:a"], own=number) == ""
    assert [fence.token for fence in fences] == [1, 1]
    # A replica leaves and returns as another process.
    assert run.admit(fences[0], ["0:a"], quorum_id=2) == ""
    later = run.fence(1)
    for number, fence in enumerate((fences[0], later)):
        assert run.admit(fence, ["0:a", "1:b"], own=number, quorum_id=3) == ""
    assert (fences[0].token, later.token) == (3, 3)
    newest = run.tokens.newest()
    assert newest is not None
    assert newest.last_takeover == 0


def test_one_side_of_a_partition_waits(run: Run) -> None:
    fences = [run.fence(0), run.fence(1)]
    for number, fence in enumerate(fences):
        assert run.admit(fence, ["0:a", "1:a"], own=number) == ""
    # Both have a process of the last quorum; the first to claim continues.
    assert run.admit(fences[1], ["1:a"], lighthouse="second") == ""
    reason = run.admit(fences[0], ["0:a"], quorum_id=2)
    assert "trained 0 s ago with another lighthouse" in reason
    # After the partition it heals, and does not have to restart.
    assert run.admit(fences[0], ["0:a", "1:a"], lighthouse="second", quorum_id=2) == ""


def test_a_takeover_needs_an_expired_lease_and_time_for_the_missing(run: Run) -> None:
    assert run.admit(run.fence(0), ["0:a", "1:a"]) == ""
    stranger = run.fence(2)
    assert "need the same lighthouse" in run.admit(stranger, ["2:a"], lighthouse="second")
    run.expire()
    reason = run.admit(stranger, ["2:a"], lighthouse="second")
    assert "replica_00000, replica_00001 may have a newer state" in reason
    time.sleep(JOIN_TIMEOUT_S)
    assert run.admit(stranger, ["2:a"], lighthouse="second") == ""
    newest = run.tokens.newest()
    assert newest is not None
    assert (newest.token, newest.last_takeover) == (2, 2)


def test_a_superseded_replica_ends(run: Run) -> None:
    suspended = run.fence(0)
    assert run.admit(suspended, ["0:a"]) == ""
    assert not suspended.is_superseded()
    run.expire()
    other = run.fence(1)
    run.admit(other, ["1:a"], lighthouse="second")
    time.sleep(JOIN_TIMEOUT_S)
    assert run.admit(other, ["1:a"], lighthouse="second") == ""
    # It was suspended, so its last check is old.
    suspended._checked_s -= 2 * fencing.LEASE_S
    assert suspended.is_superseded()
    with pytest.raises(ReplicaError, match=r"replica_00001 could not reach .* under token 2\."):
        run.admit(suspended, ["0:a", "1:a"], quorum_id=5)
    # The others wait until it is gone, and train with its next process.
    reason = run.admit(other, ["0:a", "1:a"], own=1, quorum_id=5, tokens=[1, 2])
    assert "must restart" in reason
    run.tokens.record_token(2)
    restarted = run.fence(0)
    assert run.admit(restarted, ["0:b", "1:a"], quorum_id=6) == ""


def test_all_processes_of_all_replicas_are_new(run: Run) -> None:
    assert run.admit(run.fence(0), ["0:a", "1:a"]) == ""
    first, second = run.fence(0), run.fence(1)
    # The first to return waits for the other, which may have a newer state.
    assert "trained 0 s ago" in run.admit(first, ["0:b"], quorum_id=2)
    # The lighthouse has removed the older processes.
    for number, fence in enumerate((first, second)):
        assert run.admit(fence, ["0:b", "1:b"], own=number, quorum_id=3) == ""
    newest = run.tokens.newest()
    assert newest is not None
    assert newest.last_takeover == 0


def test_nobody_waits_for_replicas_that_left_with_their_state_saved(run: Run) -> None:
    fences = [run.fence(0), run.fence(1)]
    for number, fence in enumerate(fences):
        assert run.admit(fence, ["0:a", "1:a"], own=number) == ""
    for number, fence in enumerate(fences):
        fence.release(_process(f"{number}:a"))
    assert run.admit(run.fence(2), ["2:a"], lighthouse="second") == ""


def test_another_folder_is_noticed(run: Run) -> None:
    assert run.admit(run.fence(0), ["0:a", "1:a"]) == ""
    reason = run.admit(run.fence(1), ["0:a", "1:a"], own=1, quorum_id=2, tokens=[9, 0])
    assert "all replicas need the same job.dump_folder" in reason


class _BrokenTokens(FencingTokens):
    """Fencing tokens on a disk that is full, gone, or does not answer."""

    is_full = True
    is_gone = False
    answers: threading.Event | None = None

    def try_claim(self, claim: Any) -> bool:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().try_claim(claim)

    def newest(self) -> Any:
        if self.is_gone:
            raise OSError(5, "Input/output error")
        if self.answers is not None:
            self.answers.wait()
        return super().newest()


def test_a_quorum_continues_without_its_disk_and_a_new_one_does_not_begin(run: Run) -> None:
    fence, broken = run.fence(0), _BrokenTokens(run.tokens.run_folder, 0)
    assert run.admit(fence, ["0:a", "1:a"]) == ""
    fence._tokens = broken
    assert run.admit(fence, ["0:a"], quorum_id=2) == ""
    assert not fence.is_claimed
    # A replica that returns agrees with it.
    assert run.admit(run.fence(1, broken), ["0:a", "1:b"], own=1, quorum_id=3) == ""
    assert "No space left" in run.admit(run.fence(2, broken), ["0:b", "1:b"], quorum_id=4)
    broken.is_gone = True
    assert run.admit(fence, ["0:a"], quorum_id=5) == ""
    assert "Input/output error" in run.admit(run.fence(2, broken), ["0:a"], quorum_id=6)


def test_leases_are_renewed_until_the_fence_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_RENEW_EVERY_S", 0.02)
    fence = run.fence(0)
    assert run.admit(fence, ["0:a"]) == ""
    newest = run.tokens.newest()
    assert newest is not None
    run.expire()
    _wait_until(lambda: run.tokens.seconds_since_renewal(newest) < 5)
    fence.close()
    run.expire()
    time.sleep(0.2)
    assert run.tokens.seconds_since_renewal(newest) > fencing.LEASE_S


@pytest.mark.parametrize("lasts", [False, True], ids=["full disk", "no answer"])
def test_only_most_of_a_quorum_continues_without_a_claim(
    run: Run, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = ["0:a", "1:a", "2:a", "3:a"]
    fences = [run.fence(number) for number in range(4)]
    for number, fence in enumerate(fences):
        assert run.admit(fence, members, own=number) == ""
        assert fence.is_claimed
        broken = _BrokenTokens(run.tokens.run_folder, number)
        if lasts:
            broken.answers = threading.Event()
        fence._tokens = broken
    if lasts:
        monkeypatch.setattr(fencing, "_ANSWER_WITHIN_S", 0.1)
    expected = "does not answer" if lasts else "No space left"
    for number, others in enumerate((["0:a", "2:a"], ["1:a", "3:a"])):
        reason = run.admit(fences[number], others, quorum_id=2, lighthouse=str(number))
        assert reason == "" if number == 0 else expected in reason
    reason = run.admit(fences[1], ["1:a", "2:a", "3:a"], quorum_id=3)
    assert reason == ""
    for fence in fences:
        answers = fence._tokens.answers  # pyright: ignore[reportAttributeAccessIssue]
        if answers is not None:
            answers.set()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_quorum_without_a_claim_claims_later_or_ends(
    run: Run, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_RENEW_EVERY_S", 0.02)
    fence, other = run.fence(0), run.fence(1)
    for number, one in enumerate((fence, other)):
        assert run.admit(one, ["0:a", "1:a"], own=number) == ""
    broken = _BrokenTokens(run.tokens.run_folder, 0)
    fence._tokens = broken
    assert run.admit(fence, ["0:a"], quorum_id=2) == ""
    assert (fence.token, fence.is_claimed) == (1, False)
    if not is_first:
        assert run.admit(other, ["1:a"], lighthouse="second") == ""
        # Nothing of the other side reaches storage, although no takeover followed.
        with pytest.raises(SupersededError, match="replica_00001 could not reach"):
            broken.check(1, is_claimed=False)
    broken.is_full = False
    _wait_until(lambda: fence.is_claimed or fence.is_superseded())
    assert (fence.token, fence.is_superseded()) == ((2, False) if is_first else (1, True))
    if is_first:
        broken.check(1, is_claimed=False)
        assert "trained" in run.admit(other, ["1:a"], lighthouse="second")


def test_a_folder_that_does_not_answer_blocks_no_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, broken = run.fence(0), _BrokenTokens(run.tokens.run_folder, 0)
    assert run.admit(fence, ["0:a"]) == ""
    broken.answers = threading.Event()
    fence._tokens = broken
    monkeypatch.setattr(fencing, "_ANSWER_WITHIN_S", 0.1)
    fence._checked_s -= 2 * fencing.LEASE_S
    started_s = time.monotonic()
    for _ in range(100):
        assert not fence.is_superseded()
    assert time.monotonic() - started_s < 10 * fencing._ANSWER_WITHIN_S
    broken.answers.set()


def test_the_time_to_join_begins_when_the_lease_has_expired(run: Run) -> None:
    assert run.admit(run.fence(0), ["0:a", "1:a"]) == ""
    stranger = run.fence(2)
    assert "trained 0 s ago" in run.admit(stranger, ["2:a"], lighthouse="second")
    time.sleep(JOIN_TIMEOUT_S)
    run.expire()
    assert "may have a newer state" in run.admit(stranger, ["2:a"], lighthouse="second")
    # They return, and end again.
    assert run.admit(run.fence(0), ["0:b", "1:b"], quorum_id=2) == ""
    time.sleep(JOIN_TIMEOUT_S)
    run.expire()
    assert "may have a newer state" in run.admit(stranger, ["2:a"], lighthouse="second")


@pytest.mark.parametrize("returns", [False, True])
def test_the_time_to_join_begins_anew_with_each_sign_of_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """Their lease was renewed, or they were in a quorum with this replica."""
    now_s = 1000.0
    monkeypatch.setattr(fencing, "_WAIT_S", 0.0)
    members = ["0:a", "1:a"]
    fence = run.fence(0)
    assert run.admit(fence, members) == ""
    run.expire()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    alone = {"lighthouse": "second", "quorum_id": 2}
    assert "may have a newer state" in run.admit(fence, ["0:b"], **alone)
    if returns:
        assert run.admit(fence, members) == ""
    else:
        newest = run.tokens.newest()
        assert newest is not None
        run.tokens.renew(newest)
        assert "trained 0 s ago" in run.admit(fence, ["0:b"], **alone)
    run.expire()
    now_s += JOIN_TIMEOUT_S + 1
    assert "may have a newer state" in run.admit(fence, ["0:b"], **alone)
    now_s += JOIN_TIMEOUT_S + 1
    assert run.admit(fence, ["0:b"], **alone) == ""


def test_failures_of_the_folder_are_logged_once_until_it_answers(
    run: Run, logged: pytest.LogCaptureFixture
) -> None:
    logged.set_level(logging.INFO, logger.name)
    fence = run.fence(0)
    for _ in range(2):
        for _ in range(3):
            fence._report_failure(OSError("no space"))
        for _ in range(2):
            fence._report_success()
    levels = [record.levelname for record in logged.records]
    assert levels == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "after 3 failures" in logged.records[-1].getMessage()


def test_the_lease_of_replicas_that_stay_is_renewed_after_one_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_RENEW_EVERY_S", 0.02)
    fences = [run.fence(0), run.fence(1)]
    for number, fence in enumerate(fences):
        assert run.admit(fence, ["0:a", "1:a"], own=number) == ""
    fences[0].release(_process("0:a"))
    newest = run.tokens.newest()
    assert newest is not None
    assert newest.members == (_process("1:a"),)
    run.expire()
    _wait_until(lambda: run.tokens.seconds_since_renewal(newest) < 5)


def test_an_empty_folder_is_another_folder(run: Run) -> None:
    reason = run.admit(run.fence(1), ["0:a", "1:a"], own=1, tokens=[9, 0])
    assert "is at token 0, and another replica has seen 9" in reason


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_replica_without_a_token_joins_those_that_took_the_run_over(run: Run) -> None:
    newest = run.tokens
    claim = TokenClaim(
        token=1, lighthouse="first", quorum_id=1, members=(_process("0:a"),), last_takeover=0
    )
    for one in (claim, replace(claim, token=2, last_takeover=2)):
        assert newest.try_claim(one)
    joins = run.fence(1)
    assert run.admit(joins, ["0:a", "1:n"], own=1, quorum_id=2, tokens=[2, 0]) == ""
    assert joins.token == 3


def test_restarted_replicas_with_another_lighthouse_wait_for_the_lease(run: Run) -> None:
    """Some of them may train with the former one."""
    first = run.fence(0)
    assert run.admit(first, ["0:a", "1:a"]) == ""
    second = run.fence(0)
    assert "with another lighthouse" in run.admit(second, ["0:b", "1:b"], lighthouse="second")
    assert run.admit(second, ["0:b", "1:b"], lighthouse="first", quorum_id=2) == ""


def test_only_the_lease_of_an_own_quorum_is_renewed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = FencingTokens(run.tokens.run_folder, 0)
    fence = run.fence(0, tokens)
    fence.close()
    renewed: list[int] = []
    monkeypatch.setattr(tokens, "renew", lambda claim: renewed.append(claim.token))
    fence._is_closed = False
    fence._check()
    assert run.admit(fence, ["0:a", "1:a"]) == ""
    fence._check()
    assert renewed == [1]
    assert run.admit(run.fence(1), ["1:a"], quorum_id=2) == ""
    fence._check()
    assert renewed == [1]


def test_a_replica_in_no_quorum_renews_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.admit(run.fence(0), ["0:a"]) == ""
    tokens = FencingTokens(run.tokens.run_folder, 1)
    monkeypatch.setattr(tokens, "renew", lambda claim: pytest.fail("it renews"))
    run.fence(1, tokens)._check()
