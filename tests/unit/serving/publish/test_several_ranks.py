"""What several ranks of a run publish together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.threads import run_on_threads
from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.distributed.rpc.state_server import MAX_RANGES, MAX_ROWS, ByteRows
from torchtitan_lite.serving.publish import publisher
from torchtitan_lite.serving.publish.publication import Publication
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import _in_requests, _requests


@pytest.mark.parametrize(
    ("has_slot", "problems", "is_free", "warning"),
    [
        ((True, True), ("", ""), True, ""),
        ((True, False), ("", ""), False, "Version 8 is not published: subscribers still read"),
        ((True, True), ("", "disk full"), True, "disk full"),
    ],
)
def test_a_version_is_published_by_all_ranks_or_none(
    has_slot: tuple[bool, bool], problems: tuple[str, str], is_free: bool, warning: str
) -> None:
    def agree() -> tuple[bool, str]:
        rank, warnings = dist.get_rank(), [""]
        found: Any = SimpleNamespace(
            _problem=problems[rank],
            _config=SimpleNamespace(keep_versions=1, every_steps=1),
            _warn=warnings.append,
        )
        return Publisher._agree(found, has_slot[rank], 8), warnings[-1]

    for free, text in run_on_threads(2, agree):
        assert free == is_free and text.startswith(warning) and bool(text) == bool(warning)


def test_all_ranks_announce_their_identity_and_the_first_offers_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[Any] = []
    where: list[Any] = [None, None]

    class Stack(SimpleNamespace):
        def callback(self, *given: Any, **options: Any) -> None: ...

    region = SimpleNamespace(num_slots=1, data=lambda slot: None)

    def run(action: Any) -> Any:
        return region if action.__name__ == "create" else action()

    plan = SimpleNamespace(placed={}, slot_bytes=64)
    monkeypatch.setattr(publisher, "plan_save", lambda *given: plan)
    monkeypatch.setattr(
        publisher,
        "_describe",
        lambda *given: SimpleNamespace(tensors=(), to_dict=lambda: {"rank": dist.get_rank()}),
    )
    monkeypatch.setattr(publisher, "run_on_all_ranks", run)
    monkeypatch.setattr(publisher, "Copier", lambda *given: SimpleNamespace(close=None))
    monkeypatch.setattr(
        publisher, "ThreadPoolExecutor", lambda *given: SimpleNamespace(shutdown=None)
    )

    def open_on_rank() -> None:
        rank = dist.get_rank()
        mesh = SimpleNamespace(rank=rank, device=SimpleNamespace(torch_device=None))
        unopened: Any = SimpleNamespace(
            _config=SimpleNamespace(dtype=None, address=None, keep_versions=1),
            _mesh=mesh,
            _offer_index=offered.append,
            _offer_status=lambda versions: None,
            _published_file=SimpleNamespace(unlink=None),
            _announce=lambda about: where.__setitem__(rank, about),
        )
        stack: Any = Stack()
        Publisher._open(unopened, stack, {}, RunIdentity("run", "generation"), {}, "secret")
        assert unopened._generation_id == "generation"

    run_on_threads(2, open_on_rank)
    assert where == 2 * [{"run_id": "run", "generation_id": "generation", "url": None}]
    (index,) = offered
    assert [rank["description"] for rank in index] == [{"rank": 0}, {"rank": 1}]


def test_the_newest_version_is_one_that_all_ranks_have() -> None:
    def rank(*versions: int, is_remote: bool = False, is_current: bool = True) -> Any:
        return SimpleNamespace(
            versions=lambda: list(versions), is_remote=is_remote, is_current=lambda: is_current
        )

    def publication(*ranks: Any) -> Any:
        return SimpleNamespace(ranks=ranks)

    assert Publication.newest(publication(rank(3, 5, 7), rank(3, 5))) == 5
    assert Publication.newest(publication(rank(3, 5), rank(7))) is None
    assert Publication.newest(publication(rank(3, 5, is_remote=True), rank(3))) == 5
    assert Publication.is_current(publication(rank(), rank()))
    assert not Publication.is_current(publication(rank(), rank(is_current=False)))


@pytest.mark.parametrize("length", [1 << 20, 3 << 20, 20 << 20])
def test_requests_are_bounded_and_cover_all_rows(length: int) -> None:
    rows = ByteRows(start=64, length=length, num_rows=11, stride=length + 128)
    parts = list(_in_requests(rows))
    assert all(part.num_bytes <= 8 << 20 for part in parts)
    assert sum(part.num_bytes for part in parts) == rows.num_bytes
    starts = {part.start + row * part.stride for part in parts for row in range(part.num_rows)}
    assert {64 + row * rows.stride for row in range(11)} <= starts


def test_requests_are_as_few_as_their_limits_allow() -> None:
    one, most = ByteRows(0, 1), ByteRows(0, 1, MAX_ROWS, 1)
    large = ByteRows(0, (8 << 20) + 1)
    assert list(_requests([])) == []
    assert list(_requests([ByteRows(0, 1, MAX_ROWS - 1, 1), one, one])) == [(0, 2), (2, 3)]
    assert list(_requests([most, one, most])) == [(0, 1), (1, 2), (2, 3)]
    assert list(_requests([large, one, one])) == [(0, 1), (1, 3)]
    assert list(_requests([one] * (MAX_RANGES + 1))) == [
        (0, MAX_RANGES),
        (MAX_RANGES, MAX_RANGES + 1),
    ]
