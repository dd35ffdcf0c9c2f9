"""A trainer gives new weights to inference servers: published, broadcast, or in a file.

python -m benchmarks.publish [--quick] [--json PATH]

Ours: FSDP over 4 ranks publishes; two tensor-parallel servers in processes of their own subscribe,
through shared memory and through sockets (loopback). The peers are those of frameworks for
reinforcement learning: the trainer gathers every tensor on rank 0, which broadcasts it to the
servers over gloo, or writes one safetensors file to shared memory, of which each server reads its
part. Ours sends the shards that have changed since the version before: a share of all bytes; or,
where only some elements of each shard have changed, deltas. Peers send everything. Seconds are
those from the trainer's call to the last server rank.

The exit status is 1 if a process fails, or if a server holds anything but the published bits.
"""

import json
import secrets
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import (
    Group,
    Supervisor,
    free_port,
    wait_for,
    worker_command,
)
from benchmarks.publish_ranks import (
    COPY,
    NUM_SERVERS,
    NUM_TRAINERS,
    OURS,
    SHARES,
    VARIANTS,
    serve,
    train,
    turn_name,
)
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY, existing_run_folder

_TIMEOUT_S = 400.0
_POLL_S = 0.1
_MIB = 1 << 20
_TITLES = {"memory": "shared memory", "sockets": "sockets"}
_BROADCAST_GOALS = {
    "shards": {1.0: 1.0, 0.1: 0.35, 0.01: 0.15},
    "elements": {0.1: 1.0, 0.01: 0.5},
}
"""Goals of the seconds relative to a broadcast, by what changes and its share."""
_FILE_GOALS = {1.0: 1.0}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    state: str
    rounds: int
    """Versions of each variant and share, after one that warms up."""


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """One variant with one share of changed bytes."""

    seconds: Sequence[float]
    stalls_s: Sequence[float]
    """Stalls of the slowest trainer."""
    mib: float
    """Received by all servers."""
    num_wrong: int


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    for changes in SHARES:
        yield from _measure(plan, folder / changes, changes)


def _measure(plan: Plan, folder: Path, changes: str) -> Iterator[Result]:
    trainers, servers = _run(plan, folder, changes)
    median = statistics.median
    copy_s = median(_turns(trainers, servers, COPY).stalls_s)
    of_what = "" if changes == "shards" else f" of {changes}"
    for share in SHARES[changes]:
        turns = {
            variant: _turns(trainers, servers, turn_name(share, variant))
            for variant in VARIANTS[changes]
        }
        peers = {name: variant_turns for name, variant_turns in turns.items() if name not in OURS}
        for variant, ours in turns.items():
            if variant in peers:
                continue
            case = f"{share:.0%}{of_what} changed, {_TITLES[variant]}"
            comparison = Comparison(case, other="broadcast")
            for name, variant_turns in {"ours": ours, **peers}.items():
                comparison.note(f"seconds: {name} {formatted(variant_turns.seconds)}")
                comparison.small(f"wrong tensors: {name}", variant_turns.num_wrong, 0)
            broadcast = peers["broadcast"]
            seconds = median(ours.seconds)
            yield comparison.ratio(
                "seconds per version, and of a broadcast",
                "s",
                seconds,
                peer=median(broadcast.seconds),
                goal=_BROADCAST_GOALS[changes][share],
            )
            if "file" in peers:
                of_file = ("seconds per version, and of a file", "s", seconds)
                file_s = median(peers["file"].seconds)
                yield (
                    comparison.ratio(*of_file, peer=file_s, goal=_FILE_GOALS[share])
                    if share in _FILE_GOALS
                    else comparison.value(*of_file, peer=file_s)
                )
            yield comparison.value(
                "received by all servers, and by a broadcast", "MiB", ours.mib, peer=broadcast.mib
            )
            yield comparison.value(
                "stall of the trainer, and by a broadcast",
                "s",
                median(ours.stalls_s),
                peer=median(broadcast.stalls_s),
            )
            yield comparison.value(
                "stall of the trainer, and by a copy of the shards",
                "s",
                median(ours.stalls_s),
                peer=copy_s,
            )


_Rank = Mapping[str, Sequence[Sequence[float]]]
"""Results of one rank, by name of a turn."""


def _turns(trainers: Sequence[_Rank], servers: Sequence[_Rank], name: str) -> _Turns:
    seconds, stalls_s = [], []
    for index in range(len(trainers[0][name])):
        sent = [rank[name][index] for rank in trainers]
        received = [rank[name][index] for rank in servers]
        stalls_s.append(max(ended_s - began_s for began_s, ended_s in sent))
        began_s = min(began_s for began_s, _ in sent)
        seconds.append(max(ended_s for ended_s, _, _ in received) - began_s)
    return _Turns(
        seconds=seconds,
        stalls_s=stalls_s,
        mib=statistics.median(
            sum(num_bytes for _, num_bytes, _ in turn) / _MIB
            for turn in zip(*(rank[name] for rank in servers), strict=True)
        ),
        num_wrong=int(sum(wrong for rank in servers for _, _, wrong in rank[name])),
    )


def _run(plan: Plan, folder: Path, changes: str) -> tuple[list[_Rank], list[_Rank]]:
    """Run both worlds; return what the trainers and the servers return."""
    run_id = secrets.token_hex(16)
    worlds = {"trainers": (train, NUM_TRAINERS), "servers": (serve, NUM_SERVERS)}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        arguments = {
            "state": plan.state,
            "changes": changes,
            "rounds": plan.rounds,
            "port": free_port(),
            "run_id": run_id,
            "folder": str(folder),
            "file": str(Path(shared) / "model.safetensors"),
        }
        groups = [
            Group(
                [worker_command(function, folder / name, arguments)] * size,
                {"LOCAL_WORLD_SIZE": str(size)},
                folder / name,
            )
            for name, (function, size) in worlds.items()
        ]

        def results() -> list[list[_Rank]] | None:
            paths = [
                [folder / name / f"rank_{rank}.json" for rank in range(size)]
                for name, (_, size) in worlds.items()
            ]
            if not all(path.exists() for world in paths for path in world):
                return None
            return [[json.loads(path.read_text("utf-8")) for path in world] for world in paths]

        try:
            with Supervisor(groups, restarts=False) as supervisor:
                trainers, servers = wait_for(
                    results,
                    "result of all versions",
                    timeout_s=_TIMEOUT_S,
                    check=supervisor.check,
                    poll_s=_POLL_S,
                )
        finally:
            # Processes that failed left them.
            left = existing_run_folder(run_id)
            if left is not None:
                shutil.rmtree(left)
    return trainers, servers


if __name__ == "__main__":
    main(
        "A trainer gives new weights to inference servers.",
        measure,
        full=Plan(state="published", rounds=7),
        quick=Plan(state="small published", rounds=5),
    )
