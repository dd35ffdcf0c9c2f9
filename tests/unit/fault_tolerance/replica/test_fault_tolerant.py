"""The quorum of each step: waiting for it, healing, and what becomes of the step."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.threads import run_on_threads
from tests.unit.fault_tolerance.replica.step_votes import RecordedFence, StepVote
from tests.unit.fault_tolerance.replica.test_healing import Run, endpoint, same
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.distributed.device import Device, detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.distributed.rpc.state_server import StateServer
from torchtitan_lite.fault_tolerance.replica import fault_tolerant
from torchtitan_lite.fault_tolerance.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.fault_tolerance.replica.healing.live_state import LiveState
from torchtitan_lite.fault_tolerance.replica.healing.transport import PURPOSE, HealSource
from torchtitan_lite.fault_tolerance.replica.participation import LeaveRequested, Share
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor

_TOO_MANY = "more requests than expected"
_NO_TIME_S = 1e-6


def _quorum(
    quorum_id: int = 1, *, size: int = 2, heal: bool = False, follows_aborted_step: bool = False
) -> Any:
    return SimpleNamespace(
        quorum_id=quorum_id,
        heal=heal,
        replica_rank=0,
        replica_world_size=size,
        replica_ids=tuple(f"replica_{number}" for number in range(size)),
        lighthouse="a lighthouse",
        tokens=(0,) * size,
        follows_aborted_step=follows_aborted_step,
    )


class _Manager(StepVote):
    """The manager of a replica whose requests have `outcomes`, one after the other: the exception
    of a failed request, or the quorum."""

    full_id = "replica_0"

    def __init__(self, outcomes: Sequence[Any] = (), connected_s: float = 31.0) -> None:
        self._outcomes = list(outcomes)
        self._connected_s = connected_s
        self.quorum = _quorum(0, size=9)
        self.num_requests = 0

    def connected_s(self) -> float:
        return self._connected_s

    def set_progress(self, progress: int) -> None: ...

    def start_quorum(self) -> None:
        self.num_requests += 1
        if not self._outcomes:
            raise ReplicaError(_TOO_MANY)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self.quorum = outcome
        self._error = None

    def forget_failed_quorum(self) -> None: ...

    def num_participants(self) -> int:
        return self.quorum.replica_world_size

    def participating_rank(self) -> int:
        return self.quorum.replica_rank


@pytest.fixture(autouse=True)
def _poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_tolerant, "_POLL_S", 0.01)


@pytest.fixture
def run() -> Run:
    run = Run(elements=8)
    run.take_step()
    return run


def _replicas(
    run: Run,
    mesh: Mesh | None,
    manager: _Manager,
    *,
    fence: RecordedFence | None = None,
    source: HealSource | None = None,
    stored: int = 0,
    stop_requested: Callable[[], bool] = lambda: False,
    peer: Any = None,
    **settings: Any,
) -> FaultTolerantReplicas:
    unused: Any = None
    untyped: dict[str, Any] = {
        "manager": manager,
        "fence": fence or RecordedFence(),
        "transport": SimpleNamespace(source=source),
    }
    given: Any = mesh
    chosen: dict[str, Any] = {"quorum_timeout_s": 60, "min_replica_size": 2} | settings
    return FaultTolerantReplicas(
        FaultToleranceConfig(**chosen),
        run,
        given,
        **untyped,
        floor=ProgressFloor(0),
        endpoint=lambda url: peer,
        newest_stored_step=lambda: stored,
        wait_until_modifiable=lambda: None,
        leave=unused,
        stop_requested=stop_requested,
        initial_stored_step=0,
        phases=Phases([]),
    )


@pytest.mark.parametrize(
    ("stored", "connected_s", "error"),
    [
        (2, 31.0, "Step 2 of this run is in storage, but .* at step 1"),
        (1, 31.0, r"No quorum .* within .* .* seconds: the others do not answer"),
        # After a cut of the network, the replicas that wrote it are about to return.
        (2, 29.0, r"No quorum .* within .* .* seconds: the others do not answer"),
    ],
)
def test_a_newer_checkpoint_ends_a_replica_that_waits_for_a_quorum(
    run: Run, stored: int, connected_s: float, error: str
) -> None:
    manager = _Manager([TimeoutError("the others do not answer")] * 3, connected_s)
    timeout_s = 60 if "storage" in error else _NO_TIME_S
    replicas = _replicas(run, None, manager, stored=stored, quorum_timeout_s=timeout_s)
    with pytest.raises(ReplicaError, match=error):
        replicas.agree()


def test_a_failed_request_is_repeated(
    run: Run, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [TimeoutError(text) for text in ("no answer", "no answer", "refused")]
    manager = _Manager([*errors, _quorum(size=3)])
    assert _replicas(run, mesh, manager).agree().count == 3
    assert manager.num_requests == 4
    # The same failure is not logged each time.
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"No quorum yet, requesting again: {why}." for why in ("no answer", "refused")]


def test_a_replica_does_not_train_with_too_few_others(run: Run, mesh: Mesh) -> None:
    manager = _Manager([_quorum(1, size=1), _quorum(2, size=1), _quorum(3, size=2)])
    assert _replicas(run, mesh, manager).agree().count == 2
    assert manager.num_requests == 3


@pytest.mark.parametrize(
    ("quorum", "fence", "reason"),
    [
        (_quorum(size=1), None, "too few replicas joined"),
        (_quorum(), RecordedFence(["another lighthouse"]), "another lighthouse"),
    ],
)
def test_waiting_for_others_has_a_limit(
    run: Run, mesh: Mesh, quorum: Any, fence: RecordedFence | None, reason: str
) -> None:
    replicas = _replicas(run, mesh, _Manager([quorum]), fence=fence, quorum_timeout_s=_NO_TIME_S)
    with pytest.raises(ReplicaError, match=rf"No quorum of at least 2 .* .* seconds: {reason}"):
        replicas.agree()


def test_waiting_for_the_lighthouse_has_a_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ends = _Manager(), threading.Event()
    monkeypatch.setattr(manager, "start_quorum", lambda: ends.wait(3))
    replicas = _replicas(run, None, manager, quorum_timeout_s=_NO_TIME_S)
    with pytest.raises(ReplicaError, match="the lighthouse does not answer"):
        replicas.agree()
    ends.set()


def test_a_stop_request_ends_the_wait_for_others(
    run: Run, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_tolerant, "_CHECK_INTERVAL_S", 0.0)
    replicas = _replicas(run, mesh, _Manager([_quorum(size=1)]), stop_requested=lambda: True)
    with pytest.raises(LeaveRequested):
        replicas.agree()


def test_a_quorum_is_admitted_and_reported_once(run: Run, mesh: Mesh) -> None:
    fence = RecordedFence(["not yet"])
    manager = _Manager([_quorum(1), _quorum(1), _quorum(1), _quorum(2)])
    replicas = _replicas(run, mesh, manager, fence=fence)
    for _ in range(3):
        assert replicas.agree().count == 2
    assert fence.admitted == [1, 1, 2]
    assert [event.name for event in replicas.events()] == ["quorum", "quorum"]
    assert replicas.writer_group.fencing_token == 7


@pytest.mark.parametrize("joined_before", [False, True])
def test_a_lagging_replica_heals(run: Run, mesh: Mesh, joined_before: bool) -> None:
    donor = Run(seed=1, elements=8)
    donor.take_step()
    donor.take_step()
    quorums = [_quorum(1), _quorum(1, heal=True)] if joined_before else [_quorum(1, heal=True)]
    server = StateServer("127.0.0.1", "a secret of all replicas", PURPOSE)
    try:
        server.offer(donor.cursor, LiveState.of(donor))
        replicas = _replicas(run, mesh, _Manager(quorums), peer=endpoint(server))
        if joined_before:
            replicas.agree()
        replicas._transport.source = HealSource(server.url, donor.cursor)
        replicas.agree()
    finally:
        server.close()
    assert same(run, donor) and run.step == 2
    assert "healed" in [event.name for event in replicas.events()]


def test_a_replica_behind_storage_does_not_train(run: Run, mesh: Mesh) -> None:
    replicas = _replicas(run, mesh, _Manager([_quorum()]), stored=2)
    with pytest.raises(ReplicaError, match="Step 2 of this run is in storage"):
        replicas.agree()


def _vote(replicas: FaultTolerantReplicas, run: Run, **changes: float) -> bool:
    sums = {"num_ranks": 2.0, "cursor_sum": 2.0 * run.cursor, "step_sum": 2.0 * run.step}
    return replicas.should_commit(**sums | changes)


def test_consecutive_aborted_steps_end_a_replica(
    run: Run, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those between which a step was committed, nor those in which replicas joined."""
    monkeypatch.setattr(fault_tolerant, "_MAX_ABORTED_STEPS", 2)
    manager = _Manager([_quorum(number) for number in (1, 1, 1, 2, 2, 2)])
    replicas = _replicas(run, mesh, manager)
    for commits in (True, False, True, False, False):
        replicas.agree()
        assert _vote(replicas, run, cursor_sum=2.0 * run.cursor + (not commits)) is commits
    names = [event.name for event in replicas.events()]
    assert names == ["quorum", "step_failed", "quorum", "step_failed", "step_failed"]
    replicas.agree()
    with pytest.raises(ReplicaError, match="2 consecutive steps .* another position in the data"):
        _vote(replicas, run, num_ranks=1.0)


@pytest.mark.parametrize(
    ("is_superseded", "changes"),
    [
        (True, {}),
        (False, {"num_ranks": 1.0}),
        (False, {"cursor_sum": 17.0}),
        (False, {"step_sum": 3.0}),
    ],
)
def test_a_step_is_aborted_if_ranks_differ_or_the_run_was_taken_over(
    run: Run, mesh: Mesh, is_superseded: bool, changes: dict[str, float]
) -> None:
    fence = RecordedFence(is_superseded=is_superseded)
    replicas = _replicas(run, mesh, _Manager([_quorum(), _quorum()]), fence=fence)
    replicas.agree()
    assert not _vote(replicas, run, **changes)
    assert [event.name for event in replicas.events()] == ["quorum", "step_failed"]


def test_all_ranks_wait_for_the_reason_of_the_leader() -> None:
    def wait() -> tuple[str, int]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        fence = SimpleNamespace(admit=lambda **quorum: "a claim is young", token=7, is_claimed=True)
        quorum = SimpleNamespace(quorum_id=3, lighthouse="", replica_ids=(), tokens={})
        replicas: Any = SimpleNamespace(
            _manager=SimpleNamespace(quorum=quorum, full_id="own"),
            _quorum_id=2,
            _fence=fence if mesh.is_leader else None,
        )
        reason = FaultTolerantReplicas._reason_to_wait(replicas)
        return reason, replicas._alone.fencing_token

    assert run_on_threads(2, wait) == [("a claim is young", 7)] * 2


def test_after_a_rollback_the_steps_that_the_leader_sees_in_storage_do_not_count() -> None:
    def join() -> tuple[int, int]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        checked: list[int] = []
        replicas: Any = SimpleNamespace(
            _manager=SimpleNamespace(
                quorum=SimpleNamespace(quorum_id=3, heal=False),
                errored=lambda: None,
                num_participants=lambda: 2,
            ),
            _transport=SimpleNamespace(source=None),
            _quorum_id=2,
            _mesh=mesh,
            _newest_stored_step=lambda: 5 if mesh.is_leader else -1,
            _was_rolled_back=True,
            _initial_stored_step=3,
            _check_not_behind_storage=checked.append,
            _state=SimpleNamespace(cursor=8),
            _events=[],
        )
        assert FaultTolerantReplicas._join_quorum(replicas)
        return checked[0], replicas._initial_stored_step

    assert run_on_threads(2, join) == [(5, 5)] * 2


@pytest.mark.parametrize(
    ("step", "initial", "is_behind"), [(4, 6, False), (6, 3, False), (4, 3, True)]
)
def test_a_replica_is_behind_steps_that_it_has_neither_taken_nor_seen(
    step: int, initial: int, is_behind: bool
) -> None:
    replicas: Any = SimpleNamespace(_state=SimpleNamespace(step=step), _initial_stored_step=initial)
    if is_behind:
        with pytest.raises(ReplicaError, match="Step 6 of this run is in storage"):
            FaultTolerantReplicas._check_not_behind_storage(replicas, 6)
    else:
        FaultTolerantReplicas._check_not_behind_storage(replicas, 6)


def test_a_rank_that_is_not_the_leader_knows_no_fence(run: Run, mesh: Mesh) -> None:
    replicas = _replicas(run, mesh, _Manager([_quorum()]))
    replicas.agree()
    replicas._fence = None
    assert _vote(replicas, run)


@pytest.mark.parametrize("is_leader", [False, True])
def test_the_leader_reports_once_that_its_replica_leaves(is_leader: bool) -> None:
    left: list[str] = []
    ended: list[str] = []
    replicas: Any = object.__new__(FaultTolerantReplicas)
    replicas._has_left, replicas._leave = False, left.append
    replicas._mesh = SimpleNamespace(is_leader=is_leader)
    replicas._quorum_executor = SimpleNamespace(shutdown=lambda **_: ended.append("quorums"))
    replicas._manager = SimpleNamespace(
        full_id="a:f:1", shutdown=lambda **_: ended.append("manager")
    )
    for _ in range(2):
        replicas.close()
    assert ended == ["quorums", "manager"] and left == ["a:f:1"] * is_leader


class _ManagerBesideAnother(_Manager):
    """A manager whose sums have the numbers of another replica in them, or fail."""

    def __init__(self, outcomes: Sequence[Any], other: Sequence[float], *, fails: bool = False):
        super().__init__(outcomes)
        self._other, self._fails, self.num_sums = list(other), fails, 0

    def all_reduce_sum(self, numbers: torch.Tensor) -> Any:
        self.num_sums += 1
        numbers += torch.tensor(self._other, dtype=numbers.dtype)
        if self._fails:
            self._error = RuntimeError("the other replica has died")
        return SimpleNamespace(wait=lambda: None)


def _after_an_abort(
    run: Run, mesh: Mesh, manager: _ManagerBesideAnother, **settings: Any
) -> tuple[FaultTolerantReplicas, Share]:
    replicas = _replicas(run, mesh, manager, **settings)
    share = replicas.agree()
    return replicas, replicas.exchange_kept_work(share, lambda: [True, False, False, False])


_OTHER = [0.0, 0, 1, 0, 0, 0, 1, 0]
"""The other replica, the second participant, has computed the third of four rounds."""


def test_replicas_know_who_has_computed_which_round(run: Run, mesh: Mesh) -> None:
    manager = _ManagerBesideAnother([_quorum(follows_aborted_step=True)], _OTHER)
    _, share = _after_an_abort(run, mesh, manager)
    assert share.owners == (0, -1, 1, -1) and manager.num_sums == 1


@pytest.mark.parametrize(
    ("quorum", "other", "settings"),
    [
        (_quorum(), _OTHER, {}),
        (_quorum(follows_aborted_step=True), [1.0, *_OTHER[1:]], {}),
        (_quorum(follows_aborted_step=True), _OTHER, {"keep_gradients": "off"}),
        (_quorum(follows_aborted_step=True), _OTHER, {"replay_check": True}),
        (_quorum(follows_aborted_step=True), _OTHER, {"world_size_mode": "dynamic"}),
    ],
    ids=["no aborted step", "computed twice", "off", "replay_check", "another mode"],
)
def test_no_work_is_reused(
    run: Run, mesh: Mesh, quorum: Any, other: list[float], settings: dict[str, Any]
) -> None:
    manager = _ManagerBesideAnother([quorum], other)
    _, share = _after_an_abort(run, mesh, manager, **settings)
    assert share.owners == () and not share.reuses_work()
    assert manager.num_sums == (other[0] == 1)


def test_a_failed_exchange_reuses_nothing(run: Run, mesh: Mesh) -> None:
    quorum = _quorum(follows_aborted_step=True)
    _, share = _after_an_abort(run, mesh, _ManagerBesideAnother([quorum], _OTHER, fails=True))
    assert share.owners == ()


def test_a_replica_that_has_healed_has_computed_nothing(run: Run, mesh: Mesh) -> None:
    quorum = _quorum(follows_aborted_step=True)
    manager = _ManagerBesideAnother([quorum], _OTHER)
    replicas = _replicas(run, mesh, manager)
    share = replicas.agree()
    replicas._has_healed = True
    share = replicas.exchange_kept_work(share, lambda: [True, False, False, False])
    assert share.owners == (-1, -1, 1, -1)


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
@pytest.mark.parametrize("is_full", [False, True])
def test_gradients_are_kept_if_there_is_memory_for_them(
    run: Run, mesh: Mesh, setting: str, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _ManagerBesideAnother([_quorum()], _OTHER)
    replicas = _replicas(run, mesh, manager, keep_gradients=setting)
    share = replicas.agree()
    free = 99 if is_full else 100
    monkeypatch.setattr(Device, "free_memory_bytes", lambda device: free)
    replicas.exchange_kept_work(share, lambda: [False])
    assert not replicas.keeps_gradients, "their size is not known"
    monkeypatch.setattr(type(replicas._reducer), "num_bytes", 50)
    replicas.exchange_kept_work(share, lambda: [False])
    assert replicas.keeps_gradients == (setting == "on" or (setting == "auto" and not is_full))
    # It is decided once: what is kept would count as used.
    free = 0
    replicas.exchange_kept_work(share, lambda: [False])
    assert replicas.keeps_gradients == (setting == "on" or (setting == "auto" and not is_full))


@pytest.mark.parametrize("is_aborted", [False, True])
def test_gradients_are_restored_after_an_aborted_step_only(
    run: Run, mesh: Mesh, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step that is skipped for its numbers would spoil the next one."""
    manager = _ManagerBesideAnother([_quorum(), _quorum()], [0.0])
    replicas = _replicas(run, mesh, manager)
    replicas.agree()
    restored: list[bool] = []
    monkeypatch.setattr(
        replicas._reducer, "end_step", lambda *, restores: restored.append(restores)
    )
    if is_aborted:
        manager.abort_step("the other replica has died")
    count = 2.0
    replicas.should_commit(count, count * run.cursor, count * run.step)
    replicas.finish_step(committed=False, is_last=True)
    assert restored == [is_aborted]
