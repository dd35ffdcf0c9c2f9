"""Pools of worker processes, one per world size, shared by the tests of a file.

A pool sends cases to its workers: a function of a test module, by reference, and its arguments. A
case that fails or hangs closes its pool; the next case starts a new one.
"""

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil

from tests.forks import FORK_SERVER, send_output_to
from tests.launch import LOGS, RankFailed

GLOO_TIMEOUT_S = 120
_MAX_THREADS = 300
"""Each process group that a case leaves behind has threads that poll 100 times per second. A pool
with more threads than this in one of its workers is closed."""


class WorkerPool:
    """`world_size` processes with a common gloo process group."""

    def __init__(
        self, world_size: int, context: ForkServerContext | SpawnContext = FORK_SERVER
    ) -> None:
        """`context` starts the processes. Forks of one server have the same string hash seed."""
        self.world_size = world_size
        self._context = context
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
        """Run `case(*args)` on every rank and return the results by rank. Raises RankFailed with
        the first traceback."""
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send((case, args))
        results: dict[int, Any] = {}
        max_threads = 0
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                self.close()
                message = f"ranks {silent} returned nothing within {timeout_s} s"
                raise RankFailed(message, self._log(silent[0]))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed, value, num_threads = connection.recv()
                except EOFError:
                    failed, value, num_threads = True, "the process died", 0
                if failed:
                    self.close()
                    message = f"rank {rank} of {self.world_size} failed:\n{value}"
                    raise RankFailed(message, self._log(rank))
                results[rank] = value
                max_threads = max(max_threads, num_threads)
        if max_threads > _MAX_THREADS:
            self.close()
        return [results[rank] for rank in range(self.world_size)]

    def renew(self) -> None:
        """Start a new world of the same processes: their process groups end, and what libraries
        have derived for operations is kept."""
        if self._workers:
            try:
                self.run(_renew, _new_store())
            except RankFailed:
                # The pool is closed, and the next case starts another one.
                return

    def close(self) -> None:
        """Stop the workers."""
        workers, self._workers = self._workers, []
        for process, connection in workers:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()

    def _log(self, rank: int) -> Path:
        # Each process of pytest-xdist has its own pools.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        return LOGS / f"pool-of-{self.world_size}{worker}" / f"rank-{rank}.log"

    def _start(self) -> None:
        self._log(0).parent.mkdir(parents=True, exist_ok=True)
        store = _new_store()
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            arguments = (rank, self.world_size, store, str(self._log(rank)), theirs)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, world_size: int, store: str, log: str, connection: Connection) -> None:
    send_output_to(log)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )
    import torch

    torch.set_num_threads(1)
    _join_world(store)
    # Exclude imported modules from the garbage collection after each case.
    gc.freeze()
    while True:
        try:
            case, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            value = case(*args)
            # The threads of a job's process groups end only when the cycles that hold them are
            # collected.
            gc.collect()
            connection.send((False, value, psutil.Process().num_threads()))
        except BaseException:
            traceback.print_exc()
            connection.send((True, traceback.format_exc(), 0))


def _new_store() -> str:
    return os.path.join(tempfile.mkdtemp(prefix="pool-"), "store")


def _join_world(store: str) -> None:
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # pyright: ignore[reportPrivateImportUsage]
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )


def _renew(store: str) -> None:
    from tests.job import forget_meshes
    from torchtitan_lite.axis_groups import forget_groups

    forget_meshes()
    forget_groups()
    _join_world(store)
