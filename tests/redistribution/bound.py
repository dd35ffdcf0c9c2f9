"""The fewest elements that must move from one layout to another, counted element by element.

Per element, each of the n contributions of the source is reduced into one of the m contributions of
the destination, each of which has r replicas. A contribution that is the only one of its target is
sent to the replicas that lack it. Several contributions of one target are sent to one of the
replicas, which may hold one of them already, and the result is sent to the r - 1 others.
"""

import itertools
from functools import lru_cache

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch.distributed.tensor import Partial, Replicate

from tests.redistribution.reference import coordinates, elements_of
from torchtitan_lite.distributed.redistribute import Layout


def fewest_elements(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """The minimum over all ways to reduce the contributions."""
    copies = [
        Replicate() if isinstance(p, Partial) and p.reduce_op in ("avg", "min", "max") else p
        for p in dst.placements
    ]
    if src.reduce_op is None and tuple(copies) != dst.placements:
        # Copies of a value reduce to that value: nothing moves if all holders have it.
        everywhere = Layout(dst.mesh, copies, dst.shard_order)
        if _cost(src, everywhere, shape) == 0:
            return 0
    return _cost(src, dst, shape)


def _cost(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    has, needs = _held(src, shape), _held(dst, shape)
    num_elements = int(np.prod(shape, dtype=np.int64))
    counts = [1 + max(number for number, _ in held.values()) for held in (has, needs)]
    common = np.zeros((num_elements, *counts), np.int64)
    replicas = np.zeros(num_elements, np.int64)
    for holder, (target, wanted) in needs.items():
        if target == 0:
            replicas[wanted] += 1
        if holder in has:
            one, held = has[holder]
            common[np.intersect1d(wanted, held), one, target] += 1
    if not num_elements:
        return 0
    assert (replicas == replicas[0]).all()
    kinds, times = np.unique(common, axis=0, return_counts=True)
    each = [_of_one(kind.tobytes(), kind.shape, int(replicas[0])) for kind in kinds]
    return int(np.dot(each, times))


@lru_cache(maxsize=4096)
def _of_one(common_bytes: bytes, shape: tuple[int, int], replicas: int) -> int:
    """The minimum for one element. `common` [contribution, target]: number of holders of the
    contribution that need the target.

    Every set of targets that reduce several contributions is tried. Then each contribution is
    assigned a place: a target of its own, the first place of a reduced target, or any other.
    """
    common = np.frombuffer(common_bytes, np.int64).reshape(shape)
    n, m = shape
    # With one replica, a reduction costs as much as separate targets that are not in place.
    sets = [(to,) for to in range(m)] if n > m else [()]
    if replicas > 1:
        sets = [reduced for k in range(m + 1) for reduced in itertools.combinations(range(m), k)]
    return min(_with_reduced(common, replicas, reduced) for reduced in sets)


def _with_reduced(common: np.ndarray, replicas: int, reduced: tuple[int, ...]) -> int:
    n, m = common.shape
    too_much = 1 << 20
    places = np.empty((n, m + n), np.int64)
    for to in range(m):
        if to in reduced:
            places[:, to] = np.where(common[:, to] > 0, 0, 1)
        else:
            places[:, to] = replicas - common[:, to]
    places[:, m:] = 1 if reduced else too_much
    cost = int(places[linear_sum_assignment(places)].sum())
    return cost + len(reduced) * (replicas - 1)


def _held(layout: Layout, shape: tuple[int, ...]) -> dict:
    """Holder -> the number of its contribution, and its elements."""
    held = {}
    for holder, at in coordinates(layout.mesh):
        number = 0
        for axis in layout.partial_axes:
            number = number * layout.mesh.shape[axis] + at[axis]
        held[holder] = number, elements_of(layout, shape, at).ravel()
    return held
