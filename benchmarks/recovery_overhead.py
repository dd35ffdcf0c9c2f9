"""What fault tolerance costs while nothing fails: replicas of one rank each against HSDP of as many
ranks, on the same global batch (see `recovery_turn`). Both add the same gradients up once a step.
"""

import json
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.agreement import Agreement
from benchmarks.processes import ChildFailed
from benchmarks.recovery_sides import NUM_REPLICAS, Work, free_port
from benchmarks.recovery_supervisor import Group, Supervisor
from benchmarks.recovery_turn import SIDES
from benchmarks.rows import Row, demand
from benchmarks.turns import Turns

_GOAL = 0.03
_PATIENCE_S = 240.0
_LOOK_S = 0.05
_SHOWN_LOSSES = 3


@dataclass(frozen=True, kw_only=True)
class OverheadCase:
    """How long the sides take turns."""

    work: Work
    turns: Turns


def measure_overhead(case: OverheadCase, folder: Path) -> tuple[Row, Agreement]:
    """Run the turns."""
    folder.mkdir(parents=True)
    measured = _run(case, folder)
    ours, hsdp = (measured[side] for side in SIDES)
    agreement = Agreement(f"{case.work.name}: without faults", other="HSDP")
    for name in ("dtype", "threads"):
        agreement.same(name, ours[name], hsdp[name])
    stride = -(-case.turns.total_steps // _SHOWN_LOSSES)
    agreement.close_losses(ours["losses"], hsdp["losses"], stride=stride)
    step_s, peer_s = median(ours["step_s"]), median(hsdp["step_s"])
    agreement.note(f"median step: replicas {step_s * 1e3:.1f} ms, HSDP {peer_s * 1e3:.1f} ms")
    row = demand(
        case=case.work.name,
        metric="overhead without faults over HSDP",
        unit="of a step",
        ours=step_s / peer_s - 1,
        goal=_GOAL,
        comparable=agreement.holds,
    )
    return row, agreement


def _run(case: OverheadCase, folder: Path) -> dict[str, Any]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    token = secrets.token_hex(16)
    environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "TORCHTITAN_LITE_TOKEN": token}
    lighthouse = [sys.executable, "-m", "torchtitan_lite.lighthouse", "--bind", address]
    lighthouse += ["--min-replicas", str(NUM_REPLICAS)]
    groups = [Group([lighthouse], environment, folder / "lighthouse")]
    for number in range(NUM_REPLICAS):
        own = [
            *("--fault_tolerance.enable", "true"),
            *("--fault_tolerance.replica_id", str(number)),
            *("--fault_tolerance.min_replica_size", str(NUM_REPLICAS)),
        ]
        command = _command(case, folder, "replicas", number, own)
        groups.append(Group([command], environment, folder / f"replica_{number}"))
    own = [
        *("--parallelism.data_parallel_replicate_degree", str(NUM_REPLICAS)),
        *("--parallelism.data_parallel_shard_degree", "1"),
    ]
    commands = [_command(case, folder, "hsdp", number, own) for number in range(NUM_REPLICAS)]
    groups.append(Group(commands, {}, folder / "hsdp"))
    paths = {(side, n): folder / f"{side}_{n}.json" for side in SIDES for n in range(NUM_REPLICAS)}
    with Supervisor(groups, restarts=False) as supervisor:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not all(path.exists() for path in paths.values()):
            supervisor.check()
            if time.monotonic() >= deadline_s:
                raise ChildFailed(f"The turns did not end in {_PATIENCE_S:g} s.")
            time.sleep(_LOOK_S)
        time.sleep(_LOOK_S)
    return {side: json.loads(paths[side, 0].read_text(encoding="utf-8")) for side in SIDES}


def _command(case: OverheadCase, folder: Path, side: str, number: int, own: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.recovery_turn"),
        *("--folder", str(folder), "--side", side, "--number", str(number)),
        *("--ranks", str(NUM_REPLICAS)),
        *("--warmup-steps", str(case.turns.warmup_steps)),
        *("--turn-steps", str(case.turns.steps)),
        *("--turns", str(case.turns.count)),
        *case.work.arguments,
        *("--checkpoint.enable", "false"),
        *("--job.dump_folder", str(folder / f"outputs_{side}")),
        *own,
    ]
