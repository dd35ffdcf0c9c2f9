"""Techniques of parallelism against what one would write with torch alone.

python -m benchmarks.parallel [--quick] [--json PATH]

Three comparisons, every process with one thread:

- CPU seconds per step of FSDP, TP and PP, summed over the ranks, against baseline loops with
  fully_shard, parallelize_module and Schedule1F1B on the same samples and weights (`step_cpu`);
  their loss is plain cross entropy over logits. Not wall time, because there may be more ranks than
  cores.
- Wall time and peak tensor memory of ring attention against gathered keys and values
  (`ring_attention`).
- CPU time to make the order of positions under head-tail balancing, against a Python loop.

The exit status is 1 if the variants did not do the same work; a missed goal is only reported in its
row.
"""

import statistics
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import run_ranks
from benchmarks.ring_attention import RingCase, measure_ring
from benchmarks.step_cpu import StepCase, measure_step
from benchmarks.worker import Turns, alternate
from torchtitan_lite.parallel.context import sequence_order

STEP_GOAL = 1.05
ORDER_GOAL = 0.05
_ORDER_CALLS = 5


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """A sequence that would be sharded over a number of ranks."""

    length: int
    num_ranks: int
    rounds: int

    @property
    def name(self) -> str:
        return f"head-tail order, {self.length} tokens, {self.num_ranks} ranks"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of one run."""

    step_cases: Sequence[StepCase]
    ring_cases: Sequence[RingCase]
    order_cases: Sequence[OrderCase]


def _step_cases(
    flavor: str, num_processes: int, turns: Turns, *, samples_per_step: int
) -> list[StepCase]:
    """Each technique over all processes, on the same samples."""
    techniques = {
        "FSDP": ("--training.local_batch_size", str(samples_per_step // num_processes)),
        "TP": (
            *("--training.local_batch_size", str(samples_per_step)),
            *("--parallelism.tensor_parallel_degree", str(num_processes)),
        ),
        "PP 1F1B": (
            # In microbatches of one sample.
            *("--training.local_batch_size", str(samples_per_step)),
            *("--parallelism.pipeline_parallel_degree", str(num_processes)),
            *("--parallelism.pipeline_parallel_schedule", "1F1B"),
        ),
    }
    return [
        StepCase(
            flavor=flavor,
            num_processes=num_processes,
            turns=turns,
            technique=technique,
            arguments=arguments,
            goal=STEP_GOAL,
        )
        for technique, arguments in techniques.items()
    ]


_TURNS = Turns(warmup_steps=3, steps=2, count=9)
FULL = Plan(
    step_cases=[
        case
        for num_processes in (2, 4)
        for case in _step_cases("debugmodel", num_processes, _TURNS, samples_per_step=8)
    ],
    ring_cases=[
        RingCase(flavor="debugmodel", num_processes=4, length=4096, rounds=9),
        RingCase(flavor="debugmodel", num_processes=4, length=16384, rounds=5),
    ],
    order_cases=[OrderCase(length=1 << 20, num_ranks=8, rounds=9)],
)
QUICK = Plan(
    step_cases=_step_cases("tiny", 2, Turns(warmup_steps=2, steps=1, count=5), samples_per_step=4),
    ring_cases=[RingCase(flavor="tiny", num_processes=2, length=1024, rounds=5)],
    order_cases=[OrderCase(length=1 << 18, num_ranks=8, rounds=5)],
)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all cases of `plan`, with files in `folder`."""
    for index, case in enumerate(plan.step_cases):
        yield measure_step(case, folder / f"step_{index}")
    for index, case in enumerate(plan.ring_cases):
        yield from measure_ring(case, folder / f"ring_{index}")
    for index, case in enumerate(plan.order_cases):
        yield _measure_order(case, folder / f"order_{index}")


def _measure_order(case: OrderCase, folder: Path) -> Result:
    """Measure in one process."""
    (measured,) = run_ranks(alternate_orders, asdict(case), 1, folder)
    (ours, ours_s), (peer, peer_s) = (measured[name] for name in ("ours", "loop"))
    comparison = Comparison(case.name, other="loop")
    comparison.same("CRC-32 of the positions", ours, peer)
    comparison.note(
        f"CPU ms of each round: ours {formatted(ours_s, scale=1000)}; "
        f"loop {formatted(peer_s, scale=1000)}"
    )
    return comparison.ratio(
        "CPU time to make it",
        "s",
        statistics.median(ours_s),
        peer=statistics.median(peer_s),
        goal=ORDER_GOAL,
    )


def alternate_orders(length: int, num_ranks: int, rounds: int) -> dict[str, Any]:
    """CRC-32 of the order and CPU seconds per call in each round, by variant.

    A turn is several calls, so that memory is warm for both: allocating new pages says nothing
    about either variant and may take longer than all else.
    """
    # Without the cache, which would return the first result again.
    vectorized = sequence_order.__wrapped__
    variants: dict[str, Callable[[], Any]] = {
        "ours": lambda: vectorized(length, num_ranks, True),
        "loop": lambda: _looped_order(length, num_ranks),
    }
    checksums = {
        "ours": zlib.crc32(variants["ours"]().numpy().tobytes()),
        "loop": zlib.crc32(array("q", variants["loop"]()).tobytes()),
    }
    turns = {name: partial(_cpu_s_per_call, call) for name, call in variants.items()}
    seconds = alternate(turns, rounds)
    return {name: (checksums[name], seconds[name]) for name in variants}


def _looped_order(length: int, num_ranks: int) -> list[int]:
    """The positions under head-tail balancing, one by one."""
    piece_length = length // (2 * num_ranks)
    order = []
    for rank in range(num_ranks):
        for piece in (rank, 2 * num_ranks - 1 - rank):
            for offset in range(piece_length):
                order.append(piece * piece_length + offset)
    return order


def _cpu_s_per_call(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    for _ in range(_ORDER_CALLS):
        call()
    return (time.process_time() - began_s) / _ORDER_CALLS


if __name__ == "__main__":
    main("Techniques of parallelism against plain torch.", measure, full=FULL, quick=QUICK)
