"""Ring attention against gathered keys and values: wall time and peak tensor memory.

Both variants are the attention layer of a one-layer model, with its projections and rotary
embedding, as context parallelism transforms it; they have the same weights and the same positions
of the same sequence. Forward and backward are timed from barrier to barrier, so the slowest rank
counts, and the variants alternate in one process. The all-gather variant makes its mask anew in
each forward, as the decoder makes one mask for all of its layers. The peak memory is that of a
separate forward and backward.
"""

import gc
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Comparison, Result, formatted
from benchmarks.processes import run_ranks
from benchmarks.worker import alternate, peak_tensor_bytes, timed
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.models.llama3 import FLAVORS, Llama3Dims, spec_of
from torchtitan_lite.nn.decoder import DecoderBlock
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.parallel import context

METHODS = ("alltoall", "allgather")
"""The ring, and its peer."""
TIME_GOAL = 1.0
"""The ring skips keys that the causal mask hides, which the all-gather variant computes."""
MEMORY_GOAL = 1.0
TOLERANCE = 1e-5
"""Relative to the largest element, float32: the ring adds the same terms in another order."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class RingCase:
    """A sequence on a number of processes."""

    flavor: str
    num_processes: int
    length: int
    rounds: int

    @property
    def name(self) -> str:
        return f"ring attention, {self.flavor}, {self.length} tokens, {self.num_processes} proc"


def measure_ring(case: RingCase, folder: Path) -> Iterator[Result]:
    """Measure on all ranks: a row for the time, and a row for the memory."""
    ranks = run_ranks(measure_rank, asdict(case), case.num_processes, folder)
    ours_s, peer_s = (
        [max(turn) for turn in zip(*(rank["seconds"][method] for rank in ranks), strict=True)]
        for method in METHODS
    )
    comparison = _comparison(case, "time", ranks)
    comparison.note(
        f"seconds of each round: ours {formatted(ours_s)}; all-gather {formatted(peer_s)}"
    )
    yield comparison.ratio(
        "forward and backward",
        "s",
        statistics.median(ours_s),
        peer=statistics.median(peer_s),
        goal=TIME_GOAL,
    )
    ours_mib, peer_mib = (
        [rank["peak_bytes"][method] / 2**20 for rank in ranks] for method in METHODS
    )
    comparison = _comparison(case, "memory", ranks)
    comparison.note(
        f"MiB of each rank: ours {formatted(ours_mib)}; all-gather {formatted(peer_mib)}"
    )
    yield comparison.ratio(
        "peak tensor memory of a rank", "MiB", max(ours_mib), peer=max(peer_mib), goal=MEMORY_GOAL
    )


def _comparison(case: RingCase, part: str, ranks: list[dict[str, Any]]) -> Comparison:
    comparison = Comparison(case.name, part, other="all-gather")
    for name in ranks[0]["differences"]:
        largest = max(rank["differences"][name] for rank in ranks)
        comparison.small(f"largest relative difference of the {name}", largest, TOLERANCE)
    comparison.note(f"both: {ranks[0]['dtype']}, {ranks[0]['threads']} thread per process")
    return comparison


class ShardedAttention:
    """An attention layer with a sequence that is sharded over all ranks, its input and gradient."""

    def __init__(self, mesh: Mesh, parallelism: ParallelismConfig, dims: Llama3Dims, length: int):
        spec = spec_of(dims, parallelism.context_parallel_rotate_method)
        self._model = build_decoder(dims)
        initialize(self._model, spec.init, _SEED)
        context.apply(self._model, mesh, parallelism)
        block = self._model.layers["0"]
        assert isinstance(block, DecoderBlock)
        self.attention = block.attention
        generator = torch.Generator().manual_seed(_SEED)
        whole_2SD = torch.randn(2, length, dims.dim, generator=generator)
        own = context.sequence_sharding(mesh, parallelism).own(length, whole_2SD.device)
        self._x_BSD, self._grad_BSD = (shard[None] for shard in whole_2SD[:, own])
        self._positions_BS = own[None]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward and backward, and return the output and the input's gradient."""
        x_BSD = self._x_BSD.detach().requires_grad_()
        positions_BS = self._positions_BS
        rng_keys_B = torch.zeros_like(positions_BS[:, 0])
        context = self._model.contexts(positions_BS, rng_keys_B, None)["0"]
        out_BSD = self.attention(x_BSD, context)
        out_BSD.backward(self._grad_BSD)
        assert x_BSD.grad is not None
        self.attention.zero_grad()
        return out_BSD.detach(), x_BSD.grad


def measure_rank(flavor: str, num_processes: int, length: int, rounds: int) -> dict[str, Any]:
    """Alternate the variants on one rank."""
    gc.disable()
    dims = replace(FLAVORS[flavor], num_layers=1, document_mask=False)
    parallelisms = {
        method: ParallelismConfig(
            context_parallel_degree=num_processes, context_parallel_rotate_method=method
        )
        for method in METHODS
    }
    with start_mesh(parallelisms["alltoall"], CommConfig(), detect_device("cpu")) as mesh:
        variants = {
            method: ShardedAttention(mesh, parallelism, dims, length)
            for method, parallelism in parallelisms.items()
        }
        # The warm-up, whose results are compared.
        results = {method: variant.run() for method, variant in variants.items()}
        calls = {method: variant.run for method, variant in variants.items()}
        return {
            "dtype": str(results["alltoall"][0].dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "seconds": alternate(timed(calls, mesh.barrier), rounds, warmup_rounds=0),
            "peak_bytes": {method: peak_tensor_bytes(call) for method, call in calls.items()},
            "differences": {
                name: _difference(*pair)
                for name, *pair in zip(
                    ("output", "gradient of the input"), *results.values(), strict=True
                )
            },
        }


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements, relative to the largest element."""
    return ((a - b).abs().max() / b.abs().max()).item()
