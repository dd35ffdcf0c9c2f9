"""What the ranks of a run agree on when they save and resume, each with its own view."""

import json
import os
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.snapshots import trainers
from tests.harness.threads import run_on_threads
from torchtitan_lite.checkpoint import async_setup, buddies, leftover_snapshots, manager
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver, SnapshotInterval
from torchtitan_lite.checkpoint.async_setup import wait_for_earlier_writers
from torchtitan_lite.checkpoint.buddies import open_buddies, pair_buddies
from torchtitan_lite.checkpoint.history import lineage
from torchtitan_lite.checkpoint.history.identity import agree_on_identity
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.checkpoint.leftover_snapshots import newest_leftover
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.restore import Restorer
from torchtitan_lite.checkpoint.save_context import SaveSignals
from torchtitan_lite.checkpoint.shared_memory.folder import (
    RankLock,
    region_path,
    shared_memory_folder,
)
from torchtitan_lite.checkpoint.sync_saver import SynchronousSaver
from torchtitan_lite.core.errors import DamagedCheckpoint
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims


def two_ranks() -> Mesh:
    return Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))


def test_ranks_of_two_machines_are_buddies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddies, "machine_number", lambda: 70 + dist.get_rank())

    def pair() -> tuple[int, ...]:
        context: Any = SimpleNamespace(config=SimpleNamespace(buddy_interval=1), mesh=two_ranks())
        pairing = pair_buddies(context)
        assert pairing is not None
        return pairing.sources

    assert run_on_threads(2, pair) == [(1,), (0,)]


@pytest.mark.parametrize("failing", [None, 1])
def test_copies_are_made_on_all_ranks_with_one_secret_or_on_none(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address(host: str, port: int) -> str:
        if dist.get_rank() == failing:
            raise OSError("no route")
        return "127.0.0.1"

    class Process:
        def __init__(self, region: Path, settings: Any, listener: Any) -> None:
            self.settings = settings
            listener.close()

    class Copies:
        def __init__(self, context: Any, process: Process) -> None:
            self.settings = process.settings

        def start(self) -> None:
            pass

        def close(self, *, free: bool) -> None:
            pass

    monkeypatch.setattr(buddies, "address_for_others", address)
    monkeypatch.setattr(buddies, "BuddyProcess", Process)
    monkeypatch.setattr(buddies, "BuddyCopies", Copies)

    def open_on_rank() -> Any:
        config = SimpleNamespace(buddy_mib_per_s=1, writer_nice=0)
        context: Any = SimpleNamespace(
            mesh=two_ranks(),
            config=config,
            identity=SimpleNamespace(run_id="run", generation_id="generation"),
        )
        pairing: Any = SimpleNamespace(sources=(1 - dist.get_rank(),))
        found: Any = open_buddies(context, pairing, Path("region"), None)
        return None if found is None else found.settings

    first, second = run_on_threads(2, open_on_rank)
    if failing is not None:
        assert first is None and second is None
        return
    assert first.secret == second.secret
    assert set(first.sources) == {1} and set(second.sources) == {0}


def test_all_snapshots_of_all_machines_are_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    considered: list[tuple[Any, Any]] = []
    found = SimpleNamespace(reach={0: [0], 1: [1]}, copies=(), generation_id="s", position=(0, 4))

    class Held(SimpleNamespace):
        def to_json(self) -> Any:
            return vars(self)

    def newest_common(seen: Any, machines: Any, *others: Any) -> Any:
        considered.append(([[one["starts"] for one in held] for held in seen], machines))
        return found

    def regions(run_id: str) -> Any:
        starts = f"region of {dist.get_rank()}"
        region = SimpleNamespace(
            held=lambda saver, is_copy: Held(starts=starts), generation_ids=(), slots=()
        )
        return {(dist.get_rank(), False): region}

    replaced: dict[str, Any] = {
        "machine_number": lambda: 70 + dist.get_rank(),
        "_regions": regions,
        "HeldRegion": SimpleNamespace(from_json=lambda values: values),
        "newest_common": newest_common,
        "_describe": lambda found, mine, rank: {"rank": rank},
        "_generators": lambda found, mine, rank: {},
        "_snapshot": lambda found, reports, *others: reports,
        "_close": lambda regions: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(leftover_snapshots, name, value)

    def find() -> Any:
        history: Any = SimpleNamespace(permitted=lambda: None)
        return newest_leftover("run", dist.get_rank(), history)

    assert run_on_threads(2, find) == [[{"rank": 0}, {"rank": 1}]] * 2
    assert considered == [([["region of 0"], ["region of 1"]], [70, 71])] * 2


def test_a_segment_has_one_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Clocks of two machines.
    monkeypatch.setattr(lineage.time, "time", lambda: 1000.0 + dist.get_rank())

    def begin() -> int:
        history = SnapshotLineage(tmp_path / "history", two_ranks())
        history.begin_segment(None)
        return history.segment

    assert run_on_threads(2, begin) == [1000, 1000]
    assert json.loads((tmp_path / "history").read_text()) == [[1000, None]]


def test_all_ranks_have_the_identity_that_the_leader_reads(tmp_path: Path) -> None:
    first, second = run_on_threads(2, lambda: agree_on_identity(tmp_path, two_ranks()))
    assert first == second and first.run_id and first.generation_id


def test_a_synchronous_save_fails_on_all_ranks() -> None:
    def save() -> tuple[bool, str | None]:
        mesh = two_ranks()
        saver: Any = SynchronousSaver.__new__(SynchronousSaver)
        saver._context = SimpleNamespace(mesh=mesh)
        with ThreadPoolExecutor(1) as saver._work:
            return saver._together(lambda: 1 / (1 - mesh.rank))

    (failed, problem), (failed_too, cause) = run_on_threads(2, save)
    assert failed and failed_too and problem is None and cause is not None


def test_waiting_for_a_save_acts_on_the_signals_of_all_ranks() -> None:
    def wait() -> SaveSignals:
        applied: list[SaveSignals] = []
        mesh = two_ranks()
        saver: Any = SimpleNamespace(
            _context=SimpleNamespace(mesh=mesh),
            local_signals=lambda step_s: SaveSignals(failed=mesh.rank, step_s=step_s + 1),
            apply_signals=applied.append,
            _save=None,
        )
        AsynchronousSaver.wait(saver)
        (signals,) = applied
        return signals

    assert run_on_threads(2, wait) == [SaveSignals(failed=1, step_s=2)] * 2


def test_all_ranks_know_the_steps_that_the_leader_sees() -> None:
    def steps() -> list[int]:
        mesh = two_ranks()
        seen = [3, 5] if mesh.is_leader else [3]
        storage = SimpleNamespace(root="root", steps=lambda *, repairs: [] if repairs else seen)
        restorer: Any = SimpleNamespace(
            _context=SimpleNamespace(storage=storage),
            _mesh=mesh,
            _config=SimpleNamespace(enable=True, load_only=False),
            _repairs=False,
        )
        return Restorer._stored_steps(restorer)

    assert run_on_threads(2, steps) == [[5, 3]] * 2


class _Manager(SimpleNamespace):
    """The part of a manager that sees a storage: steps 3 and 5 on the leader."""

    _stored_steps: Any

    def newest_stored(self) -> int:
        return CheckpointManager.newest_stored(self)  # type: ignore[arg-type]


def _manager(mesh: Mesh, **others: Any) -> Any:
    return _Manager(_mesh=mesh, _stored_steps=lambda: [3, 5] if mesh.is_leader else [], **others)


def test_the_newest_stored_step_is_that_of_the_leader() -> None:
    assert run_on_threads(2, lambda: _manager(two_ranks()).newest_stored()) == [5, -1]


@pytest.mark.parametrize(("step", "is_stored"), [(5, True), (4, False)])
def test_all_ranks_know_whether_another_replica_stores_the_step(step: int, is_stored: bool) -> None:
    def ask() -> bool:
        state, config = SimpleNamespace(step=step), SimpleNamespace(preemption_grace_s=0)
        found = _manager(two_ranks(), _state=state, _config=config)
        return CheckpointManager._is_stored_by_others(found)

    assert run_on_threads(2, ask) == [is_stored] * 2


@pytest.mark.parametrize(("step", "saves"), [(5, 0), (6, 1)])
def test_all_ranks_save_what_storage_lacks(step: int, saves: int) -> None:
    def store() -> int:
        calls: list[None] = []
        found = _manager(
            two_ranks(),
            _origin=SimpleNamespace(step=step),
            _writer_group=SimpleNamespace(index=0),
            _save_alone=lambda: calls.append(None),
        )
        CheckpointManager._store_unless_stored(found)
        return len(calls)

    assert run_on_threads(2, store) == [saves] * 2


def test_a_takeover_that_the_leader_sees_removes_the_snapshots_of_all_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[int] = []
    monkeypatch.setattr(manager, "remove_regions", lambda run_id: removed.append(dist.get_rank()))
    monkeypatch.setattr(manager, "superseded_message", lambda *given: "taken over")

    def discard(is_taken_over: bool) -> tuple[bool, int]:
        mesh = two_ranks()
        claim = SimpleNamespace(token=9) if mesh.is_leader and is_taken_over else None
        groups: list[Any] = []
        fencing_tokens = SimpleNamespace(record_token=lambda token: None)
        found: Any = SimpleNamespace(
            _context=SimpleNamespace(
                fencing_tokens=fencing_tokens, identity=SimpleNamespace(run_id="run")
            ),
            _mesh=mesh,
            _last_tokens=lambda fencing_tokens: (4 if mesh.is_leader else 0, claim),
            set_writer_group=groups.append,
        )
        has_lost = CheckpointManager._discard_superseded_snapshots(found)
        return has_lost, groups[0].fencing_token

    assert run_on_threads(2, discard, False) == [(False, 4)] * 2 and not removed
    assert run_on_threads(2, discard, True) == [(True, 9)] * 2 and sorted(removed) == [0, 1]


def test_the_signals_of_a_step_are_float64() -> None:
    # Float32 has no odd integers of this size.
    signals = SaveSignals(copy_s=2**25 + 1)
    found: Any = SimpleNamespace(
        _saver=SimpleNamespace(local_signals=lambda step_s: signals), _step_ended=0.0
    )
    assert CheckpointManager.local_signals(found).tolist() == signals.to_list()


def test_a_damaged_start_is_tried_again_while_other_replicas_save_newer_steps() -> None:
    attempts = [DamagedCheckpoint("step 3"), None]

    def restore() -> None:
        error = attempts.pop(0)
        if error is not None:
            raise error

    restorer: Any = SimpleNamespace(
        _restore=restore,
        newest_seen=3,
        _context=SimpleNamespace(is_shared=True),
        _stored_steps=lambda: [5, 3],
    )
    assert Restorer.restore(restorer) is None and not attempts
    attempts[:] = [DamagedCheckpoint("step 5")]
    restorer.newest_seen = 5
    with pytest.raises(DamagedCheckpoint, match="step 5"):
        Restorer.restore(restorer)


def test_the_interval_of_snapshots_follows_their_cost() -> None:
    interval = SnapshotInterval(-1)
    interval.update(copy_s=2.9, step_s=10.0)
    # 3% of ten steps suffice.
    assert interval.steps == 10
    # Single long ones are other load on the machine.
    interval.update(copy_s=60.0, step_s=10.0)
    assert interval.steps == 11
    interval.update(copy_s=0.03, step_s=10.0)
    assert interval.steps == 1


@pytest.mark.parametrize(("is_lost", "grace_s"), [(True, 20.0), (False, 0.0)])
def test_the_leaders_writer_is_ended_once_no_other_rank_has_one(
    is_lost: bool, grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the part of rank 1, whose machine is lost, or whose writer still runs."""
    root, run_id = tmp_path / "checkpoint", secrets.token_hex(16)
    bases = [tmp_path / "first", tmp_path / "second"]
    for base in bases:
        base.mkdir()
    folders = [shared_memory_folder(run_id, base=base) for base in bases]
    monkeypatch.setattr(
        async_setup, "shared_memory_folder", lambda run_id: folders[dist.get_rank()]
    )

    def wait() -> bool:
        config = SimpleNamespace(preemption_grace_s=grace_s)
        identity = SimpleNamespace(run_id=run_id)
        context: Any = SimpleNamespace(mesh=two_ranks(), config=config, identity=identity)
        return wait_for_earlier_writers(context, is_first_try=True)

    with trainers(bases[0], root, 2, run_id=run_id) as run:
        run.regions.pop().unlink()
        run.snapshot(0, 7)
        run.start(preemption_grace_s=20.0)
        lock = RankLock(folders[1], 1)
        if not is_lost:
            region_path(folders[1], 1).touch()
            assert lock.try_acquire()
        run.disconnect()
        began_s = time.monotonic()
        assert run_on_threads(2, wait) == [is_lost] * 2
        assert time.monotonic() - began_s < 10
        assert bool(list(folders[0].glob("last-*"))) == is_lost
        assert run.writers[0].alive != is_lost
        lock.release()
        if not is_lost:
            assert run.writers[0].pid is not None
            os.kill(run.writers[0].pid, signal.SIGKILL)
