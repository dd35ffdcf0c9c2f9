"""What both trainers of the GPU benchmark share: the cases, samples, weights, clock and profile.

Nothing here imports a trainer. On a CPU the same code runs with `TINY` sizes, as a rehearsal.
"""

import os
import re
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtitan_lite.data.loader import CorpusSource, DataLoader
from torchtitan_lite.data.packing import PackedBlocks

LR, WARMUP_STEPS, MAX_NORM = 3e-4, 2, 1.0
PROFILED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload. Sizes are those of Llama 3.2 1B with an output layer of its own."""

    name: str
    batch: int
    seq_len: int
    recompute: str = "none"
    """Activation checkpointing: "none" or "op" (selective, per operation)."""
    goal: float = 1.0
    """Least tokens per second, as a multiple of torchtitan's."""
    save_every: int = 0
    """Steps between saves; 0: none."""
    warmup_steps: int = 10
    steps: int = 20
    log_freq: int = 10
    """Steps between two logged losses; torchtitan logs that of step 1, too."""
    num_layers: int = 16
    dim: int = 2048
    num_heads: int = 32
    num_kv_heads: int = 8
    hidden_dim: int = 8192
    vocab_size: int = 128256
    device: str = "cuda"
    compiled: bool = True

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq_len

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    @property
    def trained_steps(self) -> int:
        """Steps of the run: the profiled ones follow, or one because torchtitan's save of the last
        step is synchronous."""
        return self.total_steps + (1 if self.save_every else PROFILED_STEPS)

    def arguments(self) -> dict[str, Any]:
        """Return the fields, for another process."""
        return asdict(self)


CASES = {
    "a": Case(name="1 x 8192", batch=1, seq_len=8192),
    "b": Case(name="4 x 8192, AC op", batch=4, seq_len=8192, recompute="op"),
    "c": Case(name="8 x 2048, AC op", batch=8, seq_len=2048, recompute="op"),
    # 4 layers, so that several saves fit on a small disk: 9 GB of state.
    "saves": Case(
        name="saves", batch=2, seq_len=8192, num_layers=4, save_every=10, warmup_steps=10, steps=40
    ),
}


def tiny(case: Case) -> Case:
    """Return a case in sizes for a CPU."""
    return replace(
        case,
        seq_len=32,
        warmup_steps=2,
        steps=4 if not case.save_every else 8,
        log_freq=2,
        save_every=2 if case.save_every else 0,
        num_layers=2,
        dim=64,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=128,
        vocab_size=512,
        device="cpu",
        compiled=False,
    )


def random_samples(case: Case) -> DataLoader:
    """Return a loader of random tokens, the same for both trainers: step i (from 0) has the samples
    `range(i * batch, (i + 1) * batch)`."""
    num_blocks = case.batch * (case.trained_steps + 1)
    random = np.random.default_rng(1)
    tokens = random.integers(0, case.vocab_size, num_blocks * case.seq_len + 1, dtype=np.int32)
    blocks = PackedBlocks(tokens, np.zeros(1, np.int64), case.seq_len)
    source = CorpusSource(name="random", weight=1.0, digest="random", blocks=blocks)
    return DataLoader(
        [source],
        seq_len=case.seq_len,
        seed=0,
        document_mask=False,
        pin_memory=case.device == "cuda",
    )


@torch.no_grad()
def fill_weights(
    parameters: Mapping[str, torch.Tensor],
    rotated_pairs: Mapping[str, int] | None = None,
    *,
    draws_on: str | None = None,
) -> None:
    """Overwrite parameters of both trainers alike, from a generator keyed by the name, on the
    device `draws_on` or the parameter's.

    `rotated_pairs` gives the heads of the parameters (by the end of their names) whose model
    rotates adjacent numbers; their rows are permuted from halves to pairs.
    """
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        device = torch.device(draws_on or parameter.device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        drawn.normal_(0.0, 0.02, generator=generator)
        heads = [n for end, n in (rotated_pairs or {}).items() if name.endswith(end)]
        if heads:
            drawn = drawn.unflatten(0, (heads[0], 2, -1)).transpose(1, 2).flatten(0, 2)
        parameter.copy_(drawn)


class StepClock:
    """Durations of steps, without a wait of its own: events on a GPU, wall time on a CPU."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[Any] = []
        self.first_step_at_s = 0.0
        """Time of day at which the first step had ended."""

    def mark(self) -> None:
        """Record the end of a step."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if len(self._marks) == 1:
            self._synchronize()
            self.first_step_at_s = time.time()

    def step_s(self) -> list[float]:
        """Return the seconds of each step after the first."""
        self._synchronize()
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        if self._is_cuda:
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


class WallClock(StepClock):
    """Durations of steps as the host sees them, for what blocks the host alone (saves)."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._waits = self._is_cuda
        self._is_cuda = False

    def mark(self) -> None:
        if self._waits:
            torch.cuda.synchronize()
        super().mark()


def use_all_cores() -> None:
    """Undo the single thread of the other benchmarks: a trainer on a GPU has the cores for itself,
    and initial weights may be drawn by all of them."""
    torch.set_num_threads(os.cpu_count() or 1)


def clock_of(case: Case) -> StepClock:
    """Return the clock of a case."""
    return (WallClock if case.save_every else StepClock)(case.device)


class Recording:
    """Measurements of a trainer's process, as JSON values."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = clock_of(case)
        self.losses: dict[int, float] = {}
        self.stalls_s: list[float] = []
        self._profiler: torch.profiler.profile | None = None
        self._steps = 0
        self._peak_bytes = 0
        self._profile: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def end_step(self) -> None:
        """Call at the end of each step. Profiles the steps after the timed ones."""
        self._steps += 1
        if self._steps <= self.case.total_steps:
            self.clock.mark()
        if self.case.device != "cuda":
            return
        if self._steps == 1:
            # The first step compiles; its autotuning may take memory that no step needs.
            torch.cuda.reset_peak_memory_stats()
        elif self._steps <= self.case.total_steps:
            # In every step: a trainer that logs its peak begins a new one.
            self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())
        if self._steps == self.case.total_steps:
            torch.cuda.synchronize()
            if not self.case.save_every:
                self._profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA]
                )
                self._profiler.start()
        elif self._steps == self.case.total_steps + PROFILED_STEPS and self._profiler:
            torch.cuda.synchronize()
            self._profiler.stop()
            kernels = [
                (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
                for event in self._profiler.events() or ()
                # FSDP and optimizers annotate spans of the GPU, which are no kernels.
                if event.device_type.name == "CUDA" and not event.is_user_annotation
            ]
            self._profile = kernel_times(kernels, PROFILED_STEPS)
            self._longest = longest_kernels(kernels, PROFILED_STEPS)

    def values(self, parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
        """Return the measurements."""
        sizes = [(parameter.numel(), str(parameter.dtype)) for parameter in parameters]
        return {
            "step_s": self.clock.step_s()[self.case.warmup_steps - 1 :],
            "first_step_at_s": self.clock.first_step_at_s,
            "losses": {str(step): loss for step, loss in self.losses.items()},
            "peak_gib": self._peak_bytes / 2**30,
            "num_params": sum(count for count, _ in sizes),
            "dtype": "+".join(sorted({dtype for _, dtype in sizes})),
            "profile_ms": {name: 1000 * s for name, s in self._profile.items()},
            "longest_kernels_ms": {name: 1000 * s for name, s in self._longest.items()},
        }


_KINDS = (
    # In this order: names of later kinds occur in those of earlier ones.
    ("attention", r"flash|fmha|sdpa|attention|flex"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|_mm_|matmul"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm"),
    ("loss", r"softmax|nll_loss|cross_entropy|logsumexp|scatter_add"),
    ("copies", r"memcpy|memset|copy|to_copy|direct_copy|cat"),
)


def kernel_times(kernels: Sequence[tuple[str, float, float]], num_steps: int) -> dict[str, float]:
    """Return seconds per step by kind of kernel, and the time in which none ran. `kernels` are
    names with their start and end in seconds."""
    totals = dict.fromkeys([*(kind for kind, _ in _KINDS), "other", "idle"], 0.0)
    busy_s, reached_s = 0.0, float("-inf")
    for name, start_s, end_s in sorted(kernels, key=lambda kernel: kernel[1]):
        kinds = (kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
        totals[next(kinds, "other")] += end_s - start_s
        busy_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    if kernels:
        span_s = reached_s - min(start_s for _, start_s, _ in kernels)
        totals["idle"] = span_s - busy_s
    return {kind: total / num_steps for kind, total in totals.items()}


def longest_kernels(
    kernels: Sequence[tuple[str, float, float]], num_steps: int, count: int = 30
) -> dict[str, float]:
    """Return seconds per step of the kernels that take the longest in total, by name."""
    totals: defaultdict[str, float] = defaultdict(float)
    for name, start_s, end_s in kernels:
        totals[name[:120]] += (end_s - start_s) / num_steps
    longest = sorted(totals, key=lambda name: -totals[name])[:count]
    return {name: totals[name] for name in longest}


def extra_per_save_s(step_s: Sequence[float], every: int) -> list[float]:
    """Return the seconds beyond the median step of each cycle of `every` steps that ends with a
    save, and during which the save before is written."""
    cycles = [step_s[start : start + every] for start in range(0, len(step_s), every)]
    plain_s = statistics.median(step_s)
    return [sum(cycle) - len(cycle) * plain_s for cycle in cycles if len(cycle) == every]
