"""Cases that workers of a pool run: moves through the public functions, checked to the bit."""

from collections.abc import Sequence

import torch.distributed as dist

from tests.redistribution.processes import Move, assert_arrived, device_mesh, reading, source
from torchtitan_lite.redistribute import ExchangeOptions, redistribute, redistribute_state_dict
from torchtitan_lite.redistribute.placements import StridedReading


def one_by_one(moves: Sequence[Move], options: Sequence[ExchangeOptions]) -> None:
    """Every tensor on its own, by each of `options`."""
    for seed, move in enumerate(moves):
        for some in options:
            tensor = source(move, seed)
            result = redistribute(
                tensor,
                move.dst,
                mesh=device_mesh(move.dst.mesh),
                strided=reading(move.src),
                options=some,
            )
            assert_arrived(move, seed, result)
            # What was given is as it was.
            assert_arrived(Move(move.src, move.src, move.shape, move.dtype), seed, tensor)


def all_at_once(moves: Sequence[Move], options: Sequence[ExchangeOptions]) -> None:
    """All tensors in one exchange for each way to read strided shards, by each of `options`."""
    numbered = list(enumerate(moves))
    by_reading: dict[StridedReading, list[tuple[int, Move]]] = {}
    for seed, move in numbered:
        by_reading.setdefault(reading(move.src), []).append((seed, move))
    for strided, some in by_reading.items():
        tensors = {str(seed): source(move, seed) for seed, move in some}
        meshes = [device_mesh(move.dst.mesh) for _, move in some]
        for how in options:
            results = redistribute_state_dict(
                tensors,
                {str(seed): move.dst for seed, move in some},
                meshes=meshes,
                strided=strided,
                options=how,
            )
            assert list(results) == list(tensors)
            for seed, move in some:
                assert_arrived(move, seed, results[str(seed)])
    dist.barrier()
