"""Cases that workers of a pool run: moves through the public functions, checked to the bit."""

from collections.abc import Sequence

import torch.distributed as dist

from tests.redistribution.processes import Move, assert_arrived, device_mesh, reading, source
from torchtitan_lite.redistribute import Means, redistribute, redistribute_state_dict
from torchtitan_lite.redistribute.strided import StridedReading


def one_by_one(moves: Sequence[Move], means: Sequence[Means]) -> None:
    """Every tensor on its own, by each of `means`."""
    for seed, move in enumerate(moves):
        for some in means:
            tensor = source(move, seed)
            result = redistribute(
                tensor,
                move.dst,
                mesh=device_mesh(move.dst.mesh),
                strided=reading(move.src),
                means=some,
            )
            assert_arrived(move, seed, result)
            # What was given is as it was.
            assert_arrived(Move(move.src, move.src, move.shape, move.dtype), seed, tensor)


def all_at_once(moves: Sequence[Move], means: Sequence[Means]) -> None:
    """All tensors in one exchange for each way to read strided shards, by each of `means`."""
    numbered = list(enumerate(moves))
    by_reading: dict[StridedReading, list[tuple[int, Move]]] = {}
    for seed, move in numbered:
        by_reading.setdefault(reading(move.src), []).append((seed, move))
    for strided, some in by_reading.items():
        tensors = {str(seed): source(move, seed) for seed, move in some}
        meshes = [device_mesh(move.dst.mesh) for _, move in some]
        for how in means:
            results = redistribute_state_dict(
                tensors,
                {str(seed): move.dst for seed, move in some},
                meshes=meshes,
                strided=strided,
                means=how,
            )
            assert list(results) == list(tensors)
            for seed, move in some:
                assert_arrived(move, seed, results[str(seed)])
    dist.barrier()
