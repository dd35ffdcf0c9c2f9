"""An export that all ranks of a run write together, file by file.

Rank 0 locks the folder, assigns the files, and gives the folder its name once all are written.
Invariant: the folder is byte for byte the one that a single process writes.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchtitan_lite.checkpoint.convert.conversion import TargetExists, Tick, check_disk_space
from torchtitan_lite.checkpoint.convert.hugging_face.export import ExportFile, FolderExport
from torchtitan_lite.core.errors import CheckpointError, UserError
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.host_collectives import all_gather_bytes, broadcast_bytes
from torchtitan_lite.distributed.on_all_ranks import first_message, run_long_on_all_ranks


def export_on_all_ranks(prepare: Callable[[], FolderExport]) -> None:
    """Write an export on all ranks of the default process group, each rank with one thread.
    `prepare` returns it on each rank, with equal sources, targets and options. Every rank must call
    it.

    A rank that cannot read the source, or does not see rank 0's folder, writes nothing, with a
    warning. On all ranks: raises TargetExists as `HuggingFaceExport` and `PartialFolder.open` do on
    rank 0, and CheckpointError or DamagedCheckpoint with any other error of any rank; nothing is
    left then. If a rank is lost, complete files remain, from which the next export continues.
    """
    try:
        with ExitStack() as folder:
            here = run_long_on_all_ranks(lambda tick: _open(prepare, folder))
            export, own = here.export, _assign(here)
            run_long_on_all_ranks(lambda tick: _write(export, own, tick))
            run_long_on_all_ranks(lambda tick: _complete(export))
    except (CheckpointError, OSError) as error:
        # On all ranks.
        is_taken = isinstance(error, TargetExists) or isinstance(error.__cause__, TargetExists)
        if taken := first_message(str(error) if is_taken else ""):
            raise TargetExists(taken) from None
        raise


def assign_files(files: Sequence[ExportFile], ranks: Sequence[int]) -> dict[int, list[ExportFile]]:
    """Distribute files over ranks, the largest file first, each to the rank that has the fewest
    bytes; of several such ranks, to the first in `ranks`."""
    shares: dict[int, list[ExportFile]] = {rank: [] for rank in ranks}
    sizes = dict.fromkeys(ranks, 0)
    for file in sorted(files, key=lambda file: -file.num_bytes):
        rank = min(ranks, key=sizes.__getitem__)
        shares[rank].append(file)
        sizes[rank] += file.num_bytes
    return shares


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What a rank knows when the folder is open."""

    export: FolderExport | None
    problem: str = ""
    """Why there is no export on this rank."""
    opened: Sequence[Any] = ()
    """On rank 0: the names of the folder, of the attempt, and of the files to write."""


def _open(prepare: Callable[[], FolderExport], folder: ExitStack) -> _Prepared:
    """Prepare the export, and on rank 0 open its folder until `folder` closes."""
    if dist.get_rank() == 0:
        export = prepare()
        check_disk_space(export.folder.target, export.num_bytes_left)
        folder.enter_context(export.folder.open())
        left = [shard.file for shard in export.shards_left]
        names = (export.folder.path.name, export.folder.attempt)
        return _Prepared(export=export, opened=(*names, left))
    try:
        return _Prepared(export=prepare())
    except (UserError, OSError) as error:
        return _Prepared(export=None, problem=str(error))


def _assign(here: _Prepared) -> list[ExportFile]:
    """Return the files that this rank writes. Collective."""
    name, attempt, left = json.loads(broadcast_bytes(json.dumps(here.opened).encode()))
    export, problem, is_leader = here.export, here.problem, dist.get_rank() == 0
    if export is not None and not is_leader:
        problem = _join(export, name, attempt)
    # Ranks of different machines first, if there are fewer files than ranks.
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    reports = all_gather_bytes(json.dumps([problem, local_rank]).encode())
    problems, local_ranks = zip(*map(json.loads, reports), strict=True)
    if is_leader:
        _warn(problems)
    able = sorted((local_ranks[rank], rank) for rank, text in enumerate(problems) if not text)
    if export is None or problem:
        return []
    shards = [shard for shard in export.shards if shard.file in left]
    return assign_files(shards, [rank for _, rank in able])[dist.get_rank()]


def _join(export: FolderExport, name: str, attempt: str) -> str:
    """Join rank 0's attempt, and return why that is impossible; "" if it is not."""
    if export.folder.path.name != name:
        return "their checkpoint differs from that of rank 0"
    try:
        export.folder.join(attempt)
    except (UserError, OSError) as error:
        return str(error)
    return ""


def _warn(problems: Sequence[str]) -> None:
    """Log which ranks do not take part, and why."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            ranks.setdefault(problem, []).append(str(rank))
    for problem, of_it in ranks.items():
        logger.warning("The export is written without ranks %s: %s", ", ".join(of_it), problem)


def _write(export: FolderExport | None, shards: Sequence[ExportFile], tick: Tick) -> None:
    if export is not None:
        export.write(shards, num_workers=1, written=lambda count: None, tick=tick)


def _complete(export: FolderExport | None) -> None:
    if export is not None and dist.get_rank() == 0:
        export.complete()
