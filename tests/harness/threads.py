"""Ranks of tests as threads of this process, with real gloo groups: a world of several ranks takes
hundredths of a second."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import (  # pyright: ignore[reportAttributeAccessIssue]
    _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from torchtitan_lite.distributed import axis_groups
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.network import cut_connections
from torchtitan_lite.distributed.torch_compat import clear_mesh_caches

_TIMEOUT_S = 15.0
_group = threading.local()


def run_on_threads(world_size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `case(*args)` as every rank of a new world, and return the results by rank. Raises the
    first error of a rank. The cases share all state of this process but process groups."""
    assert not dist.is_initialized(), "this process is in a world"
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=_TIMEOUT_S)
    ended = threading.Barrier(world_size)

    def run(rank: int) -> None:
        try:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, store=store, timeout=timeout
            )
            results[rank] = case(*args)
            with suppress(threading.BrokenBarrierError):
                # The others may still connect to this rank, and the names of groups are common.
                ended.wait(_TIMEOUT_S)
        except BaseException as error:
            errors.append(error)
            ended.abort()
            # Ranks that wait for this one fail then.
            cut_connections()
        finally:
            with suppress(Exception):
                dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    try:
        with (
            mock.patch.object(distributed_c10d, "_world", ThreadLocalWorld()),
            mock.patch.object(distributed_c10d, "_hash_ranks_to_str", _group_name),
            mock.patch.object(axis_groups, "new_local_group", _new_local_group),
            # In Python 3.11 one lock for all instances, under which a rank would wait for others.
            mock.patch.object(vars(Mesh)["expert_mesh"], "lock", nullcontext(), create=True),
            # Equal meshes of two threads are different ones then.
            mock.patch.object(device_mesh, "get_backend", lambda: "threaded"),
        ):
            threads = [
                threading.Thread(target=run, args=(rank,), daemon=True)
                for rank in range(world_size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * _TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    finally:
        _set_thread_isolation_mode(False)
        axis_groups.leave_groups()
        clear_mesh_caches()
    if errors:
        raise errors[0]
    return results


def _new_local_group(ranks: Sequence[int], timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Create a group as the product does, without its lock, which admits only one thread."""
    _group.name = name
    group = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _group_name(ranks: Sequence[int]) -> str:
    name = getattr(_group, "name", "")
    return hashlib.sha1(f"{name}:{list(ranks)}".encode(), usedforsecurity=False).hexdigest()


class AwaitedWork:
    """Work that goes on until a rank waits for it."""

    def __init__(self) -> None:
        self.num_exchanges = 0
        self._go_on = threading.Event()

    def run(self) -> int:
        assert self._go_on.wait(30)
        return 7

    def wait(self, futures: list["Future[Any]"], timeout: float) -> None:
        assert timeout > 0
        self._go_on.set()
        futures[0].exception()

    def exchange(self) -> None:
        self.num_exchanges += 1
        if self.num_exchanges == 10:
            self._go_on.set()
