"""Fencing tokens: one claim per token, leases by the clock of the filesystem, takeovers."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint import FencingTokens, TokenClaim
from torchtitan_lite.core.errors import CheckpointError

FIRST = TokenClaim(
    token=1,
    lighthouse="a lighthouse",
    quorum_id=7,
    members=("replica_00000:f:u", "replica_00001:f:v"),
    last_takeover=0,
)


def test_a_token_is_claimed_once(tmp_path: Path) -> None:
    of_threads = [FencingTokens(tmp_path, 0) for _ in range(8)]
    claims = [replace(FIRST, quorum_id=number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(FencingTokens.try_claim, of_threads, claims))
    assert sum(won) == 1
    assert of_threads[0].newest() == claims[won.index(True)]
    assert [path.name for path in of_threads[0].folder.iterdir()] == ["00000001.json"]


def test_a_claim_is_durable(tmp_path: Path, fsyncs: Fsyncs) -> None:
    tokens = FencingTokens(tmp_path, 0)
    assert tokens.try_claim(FIRST)
    assert "00000001.json" in fsyncs.synced[tokens.folder]
    assert (tokens.folder / "00000001.json").read_bytes() in fsyncs.synced.values()


def test_only_the_newest_claims_are_kept(tmp_path: Path) -> None:
    tokens, claim = FencingTokens(tmp_path, 0), FIRST
    for _ in range(40):
        assert tokens.try_claim(claim)
        claim = claim.next("another", claim.quorum_id + 1, claim.members[:1])
    newest = tokens.newest()
    assert newest is not None
    assert (newest.token, newest.quorum_id) == (40, 46)
    assert len(list(tokens.folder.iterdir())) == 16


def test_a_lease_has_the_age_of_its_renewal(tmp_path: Path) -> None:
    tokens = FencingTokens(tmp_path, 0)
    assert tokens.try_claim(FIRST)
    assert tokens.seconds_since_renewal(FIRST) < 5
    past = time.time() - 100
    os.utime(tokens.folder / "00000001.json", (past, past))
    assert 99 < tokens.seconds_since_renewal(FIRST) < 105
    tokens.renew(FIRST)
    assert tokens.seconds_since_renewal(FIRST) < 5


def test_a_takeover_supersedes_older_tokens(tmp_path: Path) -> None:
    tokens = FencingTokens(tmp_path, 0)
    second = FIRST.next("another", 1, ("replica_00002:f:w",))
    takeover = replace(second, last_takeover=2)
    third = takeover.next("another", 2, FIRST.members)
    for claim in (FIRST, takeover, third):
        assert tokens.try_claim(claim)
    assert tokens.superseded_by(1) == third
    assert tokens.superseded_by(0) == third
    for token in (2, 3):
        assert tokens.superseded_by(token) is None
        tokens.check(token)
    with pytest.raises(CheckpointError, match=r"continued the run without it, under token 2\."):
        tokens.check(1)


def test_the_last_token_of_a_replica(tmp_path: Path) -> None:
    tokens, other = FencingTokens(tmp_path, 0), FencingTokens(tmp_path, 2)
    assert tokens.last_token() == 0
    assert tokens.try_claim(FIRST)
    # Another replica made the claim, and this one could not record it.
    assert (tokens.last_token(), other.last_token()) == (1, 0)
    assert tokens.try_claim(FIRST.next("another", 1, ("replica_00002:f:w",)))
    assert (tokens.last_token(), other.last_token()) == (1, 2)
    tokens.record_token(1)
    tokens.record_token(12)
    assert tokens.last_token() == 12


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    tokens = FencingTokens(tmp_path, 0)
    tokens.folder.mkdir()
    for name, age_s in ((".draft-old", 1e5), (".draft-new", 0.0)):
        (tokens.folder / name).touch()
        past = time.time() - age_s
        os.utime(tokens.folder / name, (past, past))
    assert tokens.try_claim(FIRST)
    names = {path.name for path in tokens.folder.iterdir()}
    assert names == {".draft-new", "00000001.json"}


def test_a_filesystem_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*paths: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(CheckpointError, match=r"no hard links.*job\.dump_folder"):
        FencingTokens(tmp_path, 0).try_claim(FIRST)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"token": 2, "lighthouse": "a", "quorum_id": 1, "members": [], "last_takeover": 0}',
        b'{"token": 1, "lighthouse": "a", "quorum_id": "1", "members": [], "last_takeover": 0}',
        b'{"token": 1, "lighthouse": "a", "quorum_id": 1, "members": [3], "last_takeover": 0}',
    ],
)
def test_a_damaged_claim_is_named(content: bytes, tmp_path: Path) -> None:
    tokens = FencingTokens(tmp_path, 0)
    tokens.folder.mkdir()
    (tokens.folder / "00000001.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"00000001.json is damaged.*delete the folder"):
        tokens.newest()


@pytest.mark.parametrize(
    ("token", "name", "is_claimed", "is_superseded"),
    [
        (2, "replica_00000", True, False),
        (2, "replica_00000", False, True),
        (2, "replica_00001", False, False),
        # The newest claim is that under which it continues: a part of its quorum made it.
        (3, "replica_00000", False, False),
    ],
)
def test_a_newer_claim_of_others_supersedes_a_quorum_without_its_own(
    token: int, name: str, is_claimed: bool, is_superseded: bool
) -> None:
    newest = TokenClaim(
        token=3, lighthouse="a", quorum_id=1, members=("replica_00001:f:u",), last_takeover=0
    )
    assert newest.supersedes(token, name, is_claimed=is_claimed) is is_superseded
