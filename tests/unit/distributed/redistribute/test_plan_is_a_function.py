"""A plan depends only on its arguments: not on threads, forks, or earlier plans."""

import os
import threading
from collections.abc import Callable

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.harness.ranks import exit_status
from torchtitan_lite.distributed.redistribute import (
    HolderMesh,
    Layout,
    plan,
)
from torchtitan_lite.distributed.redistribute.planning import intersections, partition
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.torch_compat import strided_shard

SHAPE = (7, 5)
MESHES = [HolderMesh.ranks(2, 2), HolderMesh((2, 2), (3, 1, 0, 2)), HolderMesh.ranks(3, 2, first=1)]
PLACEMENTS = [
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Replicate(), Partial()],
    [strided_shard(0, 2), Shard(0)],
]
LAYOUTS = [Layout(mesh, placements) for mesh in MESHES for placements in PLACEMENTS]
PAIRS = [(src, dst) for src in LAYOUTS for dst in LAYOUTS]
CACHES: list[Callable[[], None]] = [
    plan.cache_clear,
    intersections.holder_index.cache_clear,
    intersections.matching_positions.cache_clear,
    partition.partition.cache_clear,
    partition.shard_sizes.cache_clear,
    partition.dim_intersections.cache_clear,
]
TIMEOUT_S = 60


def test_order_and_caches_do_not_change_plans() -> None:
    expected = _planned(PAIRS)
    _forget()
    assert _planned(PAIRS[::-1]) == expected[::-1]
    for pair, wanted in zip(PAIRS[::17], expected[::17], strict=True):
        _forget()
        assert _planned([pair]) == [wanted]


def test_the_order_of_holders_changes_nothing() -> None:
    for src, dst in PAIRS[::7]:
        holders = _holders(src, dst)
        _forget()
        forwards = {h: plan(src, dst, SHAPE, torch.float32).transfers(h) for h in holders}
        _forget()
        backwards = {h: plan(src, dst, SHAPE, torch.float32).transfers(h) for h in holders[::-1]}
        assert forwards == backwards


def test_threads_that_plan_and_clear_caches_at_once() -> None:
    expected = _planned(PAIRS)
    actual: list[list[object]] = []

    def work(pairs: list[tuple[Layout, Layout]], wanted: list[object]) -> None:
        for turn in range(3):
            CACHES[turn % len(CACHES)]()
            got = _planned(pairs)
            _forget()
            assert got == wanted
        actual.append(wanted)

    threads = [
        threading.Thread(target=work, args=(PAIRS, expected), daemon=True),
        threading.Thread(target=work, args=(PAIRS[::-1], expected[::-1]), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert len(actual) == len(threads)


def test_a_fork_after_planning() -> None:
    # In a process without threads, because a fork of a process with threads may crash for other
    # reasons.
    assert exit_status(_plan_and_fork) == 0


def _plan_and_fork() -> None:
    expected = _planned(PAIRS)
    child = os.fork()
    if child == 0:
        # No exception may propagate: it would run the rest of the tests twice.
        same = False
        try:
            again = _planned(PAIRS)
            _forget()
            same = again == expected and _planned(PAIRS) == expected
        finally:
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _planned(pairs: list[tuple[Layout, Layout]]) -> list[object]:
    """Return all contents of a plan."""
    result: list[object] = []
    for src, dst in pairs:
        made = plan(src, dst, SHAPE, torch.float32)
        parts = [made.transfers(holder) for holder in _holders(src, dst)]
        result.append((made.rounds, made.op, made.factor, made.moved_bytes, parts))
    return result


def _holders(src: Layout, dst: Layout) -> list[Holder]:
    return list(dict.fromkeys((*src.mesh.holders, *dst.mesh.holders)))


def _forget() -> None:
    for clear in CACHES:
        clear()
