"""What a calibration times: exchanges and collectives that tell the coefficients of `Costs` apart,
and others by which the fit is judged. Layer: above plan."""

import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.redistribute.collective import Collective, collectives_from
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.plan import Plan, plan

SHAPES = ((48, 80), (250, 256), (1000, 1024), (2048, 2048))
"""From 15 KB to 16 MB in float32."""
_SEED = 0
_R, _P, _S0, _S1 = Replicate(), Partial(), Shard(0), Shard(1)


def designed(num_ranks: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Plan | Collective]:
    """Few and many messages, pieces, rounds and bytes, and local copies alone, on at least 2
    ranks; then the collectives. They depend on nothing else."""
    return [*_exchanges(num_ranks, shapes), *_collectives(num_ranks, shapes)]


def held_out(num_ranks: int, count: int) -> list[Plan]:
    """Exchanges between random layouts of random shapes, of 16 KB to 16 MB."""
    choice, found = random.Random(_SEED), []
    meshes = _meshes(num_ranks)
    while len(found) < count:
        mesh = choice.choice(meshes)
        src = Layout(mesh, [choice.choice((_R, _S0, _S1, _P)) for _ in mesh.shape])
        dst = Layout(mesh, [choice.choice((_R, _S0, _S1)) for _ in mesh.shape])
        size, ratio = 2 ** choice.uniform(12, 22), 2 ** choice.uniform(-3, 3)
        shape = int(math.sqrt(size * ratio)), int(math.sqrt(size / ratio))
        step = _exchange(src, dst, shape)
        if not step.is_nothing:
            found.append(step)
    return found


def _meshes(num_ranks: int) -> list[HolderMesh]:
    """All ranks in a row, and in two where they are an even number."""
    meshes = [HolderMesh.ranks(num_ranks)]
    if num_ranks > 2 and num_ranks % 2 == 0:
        meshes.append(HolderMesh.ranks(num_ranks // 2, 2))
    return meshes


def _exchanges(num_ranks: int, shapes: Sequence[tuple[int, int]]) -> Iterator[Plan]:
    half = num_ranks // 2
    row, one = HolderMesh.ranks(num_ranks), HolderMesh.ranks(1)
    first, second = HolderMesh.ranks(half), HolderMesh.ranks(half, first=half)
    pairs = [
        *((Layout(row, [a]), Layout(row, [b])) for a in (_S0, _S1, _R, _P) for b in (_S0, _S1, _R)),
        (Layout(one, [_R]), Layout(row, [_R])),
        (Layout(one, [_R]), Layout(row, [_S0])),
        (Layout(row, [_S0]), Layout(one, [_R])),
        *((Layout(first, [_S0]), Layout(mesh, [_S0])) for mesh in (row, second)),
        (Layout(first, [_S0]), Layout(second, [_S1])),
    ]
    for two in _meshes(num_ranks)[1:]:
        pairs += [
            (Layout(two, [_S0, _R]), Layout(two, [_R, _S0])),
            (Layout(two, [_S0, _S1]), Layout(two, [_R, _R])),
            (Layout(two, [_R, _S1]), Layout(two, [_S0, _S0])),
            (Layout(two, [_P, _S0]), Layout(two, [_S0, _S0])),
        ]
    for shape in shapes:
        for src, dst in pairs:
            if src != dst:
                yield _exchange(src, dst, shape)


def _exchange(src: Layout, dst: Layout, shape: tuple[int, int]) -> Plan:
    return plan(src, dst, shape, torch.float32, one_exchange=True)


def _collectives(num_ranks: int, shapes: Sequence[tuple[int, int]]) -> Iterator[Collective]:
    placements: list[list[Placement]] = [[_S0], [_S1], [_P]]
    for mesh in _meshes(num_ranks):
        for given in placements:
            layout = Layout(mesh, [*given, *[_R] * (len(mesh.shape) - 1)])
            for shape in shapes:
                yield from collectives_from(layout, shape, torch.float32)
