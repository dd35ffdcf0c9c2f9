"""A measured process: it runs one function of a benchmark and writes the returned value.

python -m benchmarks.worker MODULE:FUNCTION FOLDER ARGUMENTS

ARGUMENTS is a JSON object of keyword arguments; the value goes to FOLDER/rank_N.json. Started by
`benchmarks.processes.run_ranks`, alone or by torchrun. The instruments of such processes are here
as well.
"""

import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
_POLL_S = 0.002


def alternate(
    variants: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warmup_rounds: int = 1,
    shuffled: bool = False,
) -> dict[str, list[T]]:
    """Call the variants in turns and return what each call returned, without the warm-up rounds.

    The order of a round is that of `variants`, or drawn anew from the number of the round, so that
    it is the same on every rank.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for index in range(warmup_rounds + rounds):
        names = list(variants)
        if shuffled:
            random.Random(index).shuffle(names)
        for name in names:
            value = variants[name]()
            if index >= warmup_rounds:
                results[name].append(value)
    return results


def wall_s(call: Callable[[], object], barrier: Callable[[], object]) -> float:
    """Wall seconds of `call` from barrier to barrier: of the slowest rank."""
    barrier()
    began_s = time.perf_counter()
    call()
    barrier()
    return time.perf_counter() - began_s


def timed(
    variants: Mapping[str, Callable[[], object]], barrier: Callable[[], object]
) -> dict[str, Callable[[], float]]:
    """The variants as calls that return their `wall_s`."""
    return {name: partial(wall_s, call, barrier) for name, call in variants.items()}


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Turns of training steps that two variants take."""

    warmup_steps: int
    """Length of the first turn."""
    steps: int
    """Length of each other turn."""
    count: int
    """Turns of each variant after the warm-up."""

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps * self.count

    def ends_after(self, step: int) -> bool:
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.steps == 0


def cpu_s() -> float:
    """User and system seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def io_bytes(key: str) -> int:
    """A counter of /proc/self/io: `rchar` and `wchar` of all calls, `read_bytes` from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value)
    return 0


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in /proc/PID/status; 0 if it is missing."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


class AnonymousPeak:
    """The peak of anonymous memory in a `with` block, beyond the memory before it.

    Counts this process and its descendants; shared memory and mapped files are not counted.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        self._before = _anonymous_bytes()
        self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.bytes = max(self.bytes, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += status_bytes("RssAnon", process.pid)
    return total


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """The peak of live bytes of tensors that `work` allocates, as torch's allocator counts them.

    Not the resident memory, which only grows and includes what the C library keeps. Buffers that
    are not tensors (gloo's own) are not counted. `work` runs slower than without.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        # The trace is the only public record of single allocations in order of time.
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def main(target: str, folder: str, arguments: str) -> None:
    """Run the function and write its value."""
    module, _, function = target.partition(":")
    value = getattr(import_module(module), function)(**json.loads(arguments))
    path = Path(folder) / f"rank_{os.environ.get('RANK', '0')}.json"
    # Readers may wait for the file.
    path.with_suffix(".new").write_text(json.dumps(value), encoding="utf-8")
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
    from torchtitan_lite.core.process_exit import exit_process

    exit_process(0)
