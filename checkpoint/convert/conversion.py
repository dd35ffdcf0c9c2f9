"""Helpers of the converters: model shapes, worker threads, disk capacity checks."""

import fcntl
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchtitan_lite.checkpoint.storage.attempts import box_entry
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    PartBox,
    no_tick,
)
from torchtitan_lite.core.errors import CheckpointError, WriteAbandoned
from torchtitan_lite.distributed.redistribute import Layout, layout_to_json
from torchtitan_lite.nn.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]
_T = TypeVar("_T")
Tick = Callable[[], None]
"""Callback that a worker calls often; it raises WriteAbandoned to stop it."""


def expected_shapes(spec: ModelSpec) -> tuple[Shapes, Shapes]:
    """Return the shapes of all parameters, counting a tied one once, and of the persistent
    buffers."""
    with torch.device("meta"):
        model = spec.build()
    persistent = model.state_dict(keep_vars=True)
    return (
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: tuple(b.shape) for name, b in model.named_buffers() if name in persistent},
    )


def tied_weight_names(spec: ModelSpec) -> tuple[str, str] | None:
    """Return the parameter that two modules share and the name of its second use."""
    if spec.tied_units is None:
        return None
    first, second = spec.tied_units
    return f"{first}.weight", f"{second}.weight"


def unsharded_part(
    step: int, number: int, file: str, boxes: Sequence[PartBox], written: Sequence[BoxLocation]
) -> dict[str, Any]:
    """Return the manifest part of file `number`, which holds unsharded tensors."""
    layout = layout_to_json(Layout.on_holder(file))
    tensors = {}
    for box, place in zip(boxes, written, strict=True):
        stored = box_entry([0] * len(box.size), box.size, file, place)
        tensors[box.name] = {
            "dtype": box.dtype,
            "shape": list(box.size),
            "layout": 0,
            "boxes": [stored] if math.prod(box.size) else [],
        }
    return {"rank": number, "step": step, "layouts": [layout], "tensors": tensors, "rng": {}}


class TargetExists(CheckpointError):
    """The target already exists, or another process of this machine writes it."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock an existing folder. Raises TargetExists if it is locked already."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetExists(f"Another process is writing {folder}.") from None
        yield
    finally:
        os.close(descriptor)


def check_disk_space(where: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the disk of `where`, which need not exist yet, has less than
    `num_bytes` free."""
    folder = where.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{where} needs {num_bytes / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free. "
            "Free space, or specify a folder on another disk."
        )


def run_workers(
    tasks: Sequence[_T],
    work: Callable[[_T, Tick], None],
    *,
    num_workers: int,
    also: Tick = no_tick,
) -> None:
    """Run `work` on every task with `num_workers` threads. Raises the first error, including
    KeyboardInterrupt, after all workers have stopped; remaining tasks are skipped. `also` is called
    in each tick. Threads suffice, because reading, checksums, casts and writing release the GIL."""
    stop = threading.Event()

    def tick() -> None:
        also()
        if stop.is_set():
            raise WriteAbandoned

    def run(task: _T) -> None:
        tick()
        work(task, tick)

    with ThreadPoolExecutor(num_workers, "conversion") as pool:
        running = [pool.submit(run, task) for task in tasks]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            error = next((error for future in done if (error := future.exception())), None)
        finally:
            # Also on an interrupt; the pool then joins its threads.
            stop.set()
    if error is not None:
        raise error
