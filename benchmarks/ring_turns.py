"""One rank of the comparison of ring attention with gathered keys and values.

Both sides are the attention layer of a one-layer model, with its projections and rotations, as
context parallelism changes it; they have the same weights, and see the same positions of the same
sequence. Forward and backward are timed from barrier to barrier, so that the slowest rank counts,
and the sides take turns in one process. The all-gather side's mask is made anew in each forward, as
the decoder makes one for all of its layers. The peak memory is that of a forward and backward of
their own (see `memory`).

Started by `benchmarks.parallel`, by torchrun.
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.memory import peak_tensor_bytes
from torchtitan_lite.device import detect_device
from torchtitan_lite.leaving import leave
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.models.llama3 import FLAVORS, Llama3Dims, build, spec_of
from torchtitan_lite.nn.attention import BlockContext
from torchtitan_lite.nn.decoder import DecoderBlock
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.parallel import context
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig

METHODS = ("alltoall", "allgather")
"""The ring, and what it is compared with."""

_SEED = 0


class CutAttention:
    """An attention layer whose sequence lies on all ranks, with input and upstream gradient."""

    def __init__(self, mesh: Mesh, parallelism: ParallelismConfig, dims: Llama3Dims, length: int):
        spec = spec_of(dims, parallelism.context_parallel_rotate_method)
        self._model = build(dims)
        initialize(self._model, spec.init, _SEED)
        context.apply(self._model, mesh, parallelism)
        block = self._model.layers["0"]
        assert isinstance(block, DecoderBlock)
        self.attention = block.attention
        generator = torch.Generator().manual_seed(_SEED)
        whole_2SD = torch.randn(2, length, dims.dim, generator=generator)
        own = context.sequence_sharding(mesh, parallelism).own(length, whole_2SD.device)
        self._x_BSD, self._grad_BSD = (part[None] for part in whole_2SD[:, own])
        self._positions_BS = own[None]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward. Returns the output and the input's gradient."""
        x_BSD = self._x_BSD.detach().requires_grad_()
        positions_BS = self._positions_BS
        cos, sin = self._model.rotary(positions_BS)
        mask = self._model.mask(positions_BS, None)
        keys_B = torch.zeros_like(positions_BS[:, 0])
        out_BSD = self.attention(x_BSD, BlockContext(cos, sin, mask, positions_BS, keys_B))
        out_BSD.backward(self._grad_BSD)
        assert x_BSD.grad is not None
        self.attention.zero_grad()
        return out_BSD.detach(), x_BSD.grad


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the turns, then write what was measured to FOLDER/rank_N.json."""
    parser = argparse.ArgumentParser(description="Take turns of two ways to cut a sequence.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--flavor", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args(arguments)
    gc.disable()
    dims = replace(FLAVORS[given.flavor], num_layers=1, document_mask=False)
    cuts = {
        method: ParallelismConfig(
            context_parallel_degree=given.ranks, context_parallel_rotate_method=method
        )
        for method in METHODS
    }
    with start_mesh(cuts["alltoall"], CommConfig(), detect_device("cpu")) as mesh:
        sides = {
            method: CutAttention(mesh, cut, dims, given.length) for method, cut in cuts.items()
        }
        # The warm-up gives what is compared.
        results = {method: side.run() for method, side in sides.items()}
        measured = {
            "dtype": str(results["alltoall"][0].dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "seconds": _turns(mesh, sides, given.rounds),
            "peak_bytes": {method: peak_tensor_bytes(side.run) for method, side in sides.items()},
            "differences": {
                name: _difference(*pair)
                for name, *pair in zip(
                    ("output", "gradient of the input"), *results.values(), strict=True
                )
            },
        }
        path = given.folder / f"rank_{mesh.rank}.json"
        path.write_text(json.dumps(measured), encoding="utf-8")


def _turns(mesh: Mesh, sides: dict[str, CutAttention], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by method."""
    seconds: dict[str, list[float]] = {method: [] for method in sides}
    for _ in range(rounds):
        for method, side in sides.items():
            mesh.barrier()
            began_s = time.perf_counter()
            side.run()
            mesh.barrier()
            seconds[method].append(time.perf_counter() - began_s)
    return seconds


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The greatest difference of two elements, relative to the greatest element."""
    return ((a - b).abs().max() / b.abs().max()).item()


if __name__ == "__main__":
    main()
    leave(0)
