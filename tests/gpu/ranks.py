"""Functions in processes of their own, which may share one GPU; a CUDA error of one test does not
affect the next.

Several ranks talk over gloo, for CPU and GPU tensors, because NCCL rejects ranks that share a GPU.

python -m tests.gpu.ranks MODULE:FUNCTION ARGUMENTS OUT
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port
from tests.harness.ranks import REPOSITORY, RankFailed


def run_ranks(
    function: Callable[..., Any],
    folder: Path,
    /,
    num_ranks: int = 1,
    *,
    timeout_s: float = 240,
    **arguments: Any,
) -> list[Any]:
    """Call a module-level function with plain JSON arguments in `num_ranks` processes and return
    the results by rank. Logs are in `folder`. Raises RankFailed with the log of the first rank that
    failed."""
    folder.mkdir(parents=True, exist_ok=True)
    target = f"{function.__module__}:{function.__name__}"
    port, processes = str(free_port()), []
    for rank in range(num_ranks):
        threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // num_ranks)
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            variables.pop(name, None)
        if num_ranks > 1:
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            # Every rank takes the first GPU as its own.
            variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "tests.gpu.ranks", target, json.dumps(arguments)]
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, str(folder / f"rank_{rank}.json")],
                    cwd=REPOSITORY,
                    env=variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    _wait(processes, folder, timeout_s)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(num_ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    """Wait until all processes have succeeded. Raises RankFailed."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, one in enumerate(processes) if one.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll() not in (None, 0):
                raise _failure(rank, f"exit status {process.returncode}", folder)
        for rank, process in enumerate(processes):
            if process.poll() is None:
                raise _failure(rank, f"not done within {timeout_s:g} s", folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _failure(rank: int, what: str, folder: Path) -> RankFailed:
    log = folder / f"rank_{rank}.log"
    return RankFailed(f"rank {rank}: {what}\n{log.read_text(errors='replace')[-4000:]}", log)


def _replace_functional_gather() -> None:
    """Replace the all-gather of functional collectives, by which DTensor gathers, for GPU tensors:
    it crashes the process over gloo (a segmentation fault in torch 2.11), where that of
    torch.distributed works."""
    import torch
    import torch.distributed as dist

    from torchtitan_lite.distributed.torch_compat import group_of

    operation = torch.ops._c10d_functional.all_gather_into_tensor.default

    @torch.library.impl("_c10d_functional::all_gather_into_tensor", "CUDA")
    def gather(x: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
        whole = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
        group = group_of(operation, (x, group_size, group_name), {})
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole


def main(target: str, arguments: str, out: str) -> None:
    """Run the function in this rank and write its result."""
    import torch.distributed as dist

    is_alone = "WORLD_SIZE" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
        _replace_functional_gather()
    module, _, name = target.partition(":")
    value = getattr(import_module(module), name)(**json.loads(arguments))
    Path(out).write_text(json.dumps(value), encoding="utf-8")
    if not is_alone:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    from torchtitan_lite.core.process_exit import exit_process

    exit_process(0)
