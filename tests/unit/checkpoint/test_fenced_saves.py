"""A replica that others have taken the run over from stores nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import orphan, trainers
from tests.unit.checkpoint.conftest import Manage, SmallState, run_steps
from torchtitan_lite.checkpoint import FencingTokens, TokenClaim
from torchtitan_lite.checkpoint.background.save import WriterGroup
from torchtitan_lite.core.errors import CheckpointError

_LATE = {"interval": 100, "enable_first_step_checkpoint": False}
_CLAIM = TokenClaim(
    token=1, lighthouse="one", quorum_id=1, members=("replica_00000:f:u",), last_takeover=0
)
_OTHERS = _CLAIM.next("another", 1, ("replica_00001:f:v",))
_AFTERWARDS: dict[str, tuple[TokenClaim | None, bool, bool]] = {
    "nothing": (None, True, True),
    "a replica left the quorum": (_OTHERS, True, True),
    "a takeover": (replace(_OTHERS, last_takeover=2), True, False),
    "a claim of others while this quorum had none": (_OTHERS, False, False),
}
"""What happens after a step under token 1 -> the new claim, whether the quorum of that step had a
claim of its own, and whether the step belongs to the run."""


@pytest.fixture(params=_AFTERWARDS)
def afterwards(request: pytest.FixtureRequest) -> tuple[TokenClaim | None, bool, bool]:
    return _AFTERWARDS[request.param]


@pytest.mark.parametrize("settings", [
    {"async_mode": "disabled"},
    {"async_mode": "async"},
    {"async_mode": "async", "last_save_model_only": True},
])  # fmt: skip
def test_a_final_save(
    manage: Manage, tmp_path: Path, settings: dict[str, Any],
    afterwards: tuple[TokenClaim | None, bool, bool],
) -> None:  # fmt: skip
    claim, is_claimed, stores = afterwards
    tokens, state = FencingTokens(tmp_path, 0), SmallState()
    assert tokens.try_claim(_CLAIM)
    manager = manage(state, replica=0, **_LATE, **settings)
    assert manager.restore() is None
    manager.set_writer_group(WriterGroup(fencing_token=1, is_claimed=is_claimed))
    run_steps(manager, state, 3)
    if claim is not None:
        assert tokens.try_claim(claim)
    if stores:
        manager.final_save(finished=True)
        assert _stored(manager.root) == ["step-3"]
        return
    with pytest.raises(CheckpointError):
        manager.final_save(finished=True)
    assert _stored(manager.root) == []


def test_the_flush_of_a_killed_trainer(
    manage: Manage, tmp_path: Path, afterwards: tuple[TokenClaim | None, bool, bool]
) -> None:
    """The writer has the token of the last quorum, although no save was ordered."""
    claim, is_claimed, stores = afterwards
    tokens, state = FencingTokens(tmp_path, 0), SmallState()
    assert tokens.try_claim(_CLAIM)
    manager = manage(state, replica=0, **_LATE, ram_interval=1, async_mode="async")
    manager.restore()
    manager.set_writer_group(WriterGroup(fencing_token=1, is_claimed=is_claimed))
    for _ in range(3):
        run_steps(manager, state, 1)
    if claim is not None:
        assert tokens.try_claim(claim)
    saver = manager._asynchronous
    assert saver is not None
    process = saver._writer._process
    assert process is not None
    orphan(saver._writer)
    # A superseded one does not wait for its grace period.
    assert process.wait(20) == 0
    assert _stored(manager.root) == (["step-3"] if stores else [])


def test_a_restarted_replica_may_store_its_snapshot_before_its_first_quorum(
    manage: Manage, tmp_path: Path
) -> None:
    tokens, state = FencingTokens(tmp_path, 0), SmallState()
    takeover = replace(_CLAIM, last_takeover=1)
    assert tokens.try_claim(takeover)
    manager = manage(state, replica=0, **_LATE)
    manager.restore()
    run_steps(manager, state, 1)
    manager.final_save(finished=True)
    assert _stored(manager.root) == ["step-1"]


@pytest.mark.parametrize("stores", [True, False])
def test_the_writer_of_another_rank_flushes_for_a_dead_one(tmp_path: Path, stores: bool) -> None:
    root, tokens = tmp_path / "checkpoint", FencingTokens(tmp_path, 0)
    assert tokens.try_claim(_CLAIM)
    with trainers(tmp_path, root, 2) as run:
        run.start(shared_run_folder=str(tmp_path), preemption_grace_s=200.0)
        for writer in run.writers:
            writer.set_writer_group(WriterGroup(fencing_token=1))
        run.snapshot(0, 7)
        if not stores:
            assert tokens.try_claim(replace(_OTHERS, last_takeover=2))
        leader, other = (writer._process for writer in run.writers)
        assert leader is not None and other is not None
        leader.kill()
        leader.wait()
        orphan(run.writers[1])
        assert other.wait(60) == 0
    assert _stored(root) == (["step-7"] if stores else [])


def test_a_damaged_history_is_an_error(manage: Manage, tmp_path: Path) -> None:
    folder = FencingTokens(tmp_path, 0).folder
    folder.mkdir()
    (folder / "00000001.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        manage(SmallState(), replica=0).restore()


def _stored(root: Path | str) -> list[str]:
    return sorted(path.name for path in Path(root).glob("step-*"))
