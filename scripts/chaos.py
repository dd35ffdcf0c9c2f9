"""Disturb a run with seeded faults of all kinds, and compare it with one that nothing disturbs.

python -m scripts.chaos --faults 200 [--seed 0] [--kinds rank_killed,...] [-- ARGUMENTS]
python -m scripts.chaos --list

ARGUMENTS are for train.py; without any, the debug config is trained in float64. Replicas run under
scripts.launch on this machine, one fault is done after the other, and each has to be recovered
from. The exit status is 0 when the run came through and every loss, every step's targets and the
final state are those of a straight run; 1 when not; 2 where the command line is wrong.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.chaos.follower import Follower
from torchtitan_lite.chaos.kind import Kind
from torchtitan_lite.chaos.kinds import KINDS
from torchtitan_lite.chaos.storm import (
    Run,
    StormFailed,
    Strike,
    deck,
    processes_of,
    storm,
    told,
)
from torchtitan_lite.chaos.verdict import (
    StraightRunFailed,
    differences,
    furthest,
    ledger_differences,
    newest_stored,
    state_differences,
    straight_run,
)

_ENDLESS = 1_000_000
_LOSS_TOLERANCE = 1e-8
"""Relative, float64: the same terms are added in another order by those who are there."""
_MOST_REPEATED = 6
"""Steps, of all replicas, that one fault may cost."""
_STATE_TOLERANCE = 1e-6
"""Relative to the largest element of a tensor. AdamW divides by small second moments."""


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    place = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:place])
    if options.list:
        print("\n".join(sorted(KINDS)))
        return 0
    unknown = sorted(set(options.kinds) - KINDS.keys())
    if unknown:
        print(f"chaos: no kinds {unknown}: --list shows those that are there", file=sys.stderr)
        return 2
    kinds = [KINDS[name] for name in options.kinds or sorted(KINDS)]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    arguments = [
        *(argv[place + 1 :] or _default_arguments(options.nproc_per_replica)),
        # It must not depend on where the runs end.
        f"--lr_scheduler.total_steps={_ENDLESS}",
        "--debug.sample_ledger=true",
    ]
    well = disturb(arguments, folder, kinds, options)
    if well and options.folder is None:
        shutil.rmtree(folder)
    elif not well:
        print(f"What it has left lies in {folder}.")
    return 0 if well else 1


def _default_arguments(num_ranks: int) -> list[str]:
    """For replicas of so many ranks."""
    local_batch = 2
    return [
        "--config=configs/llama3_debug_ft.toml",
        "--training.dtype=float64",
        "--training.seq_len=64",
        f"--training.local_batch_size={local_batch}",
        # Three rounds, which two replicas cannot share evenly.
        f"--training.global_batch_size={3 * local_batch * num_ranks}",
        # Rounding differences would grow with a large one.
        "--optimizer.lr=1e-4",
        "--checkpoint.interval=40",
        "--validation.enable=false",
        "--metrics.enable_tensorboard=false",
    ]


def disturb(
    arguments: Sequence[str], folder: Path, kinds: Sequence[Kind], options: argparse.Namespace
) -> bool:
    """Disturb a run in `folder` and judge it. Returns whether it came through."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        arguments=[
            *arguments,
            f"--job.dump_folder={folder / 'run'}",
            f"--training.steps={_ENDLESS}",
            "--metrics.log_freq=100",
            "--fault_tolerance.hang_timeout_s=15",
            "--fault_tolerance.process_group_timeout_ms=30000",
        ],
        folder=folder / "run",
        num_replicas=options.replicas,
        num_ranks=options.nproc_per_replica,
        launch_options=["--max-restarts=1000", "--max-restart-delay-s=1"],
    )
    strikes: list[Strike] = []
    problems: list[str] = []
    with Follower(run.folder, run.num_replicas) as follower:
        try:
            with storm(run, follower, folder / "launch.log", options.seed) as raging:
                raging.wait_for_all()
                for number, kind in enumerate(deck(kinds, options.faults, options.seed), 1):
                    strikes.append(raging.strike(kind))
                    print(f"{number:4}/{options.faults}  {_line(strikes[-1])}", flush=True)
                status = raging.end()
                if status:
                    problems.append(f"the launcher ended with status {status}")
                problems += [f"left: {one}" for one in processes_of(run.folder)]
        except StormFailed as error:
            print(error, file=sys.stderr)
            return False
    told(strikes, print)
    last = newest_stored(run.folder)
    try:
        straight = straight_run(arguments, folder / "straight", last)
    except StraightRunFailed as error:
        print(f"The straight run failed:\n{error}", file=sys.stderr)
        return False
    problems += [f"not done: {_line(one)}" for one in strikes if one.missed]
    problems += [
        f"too much: {_line(one)}" for one in strikes if one.repeated_steps > _MOST_REPEATED
    ]
    # At most a step of each replica is cut short by a fault.
    num_deaths = len(strikes) * run.num_replicas
    problems += ledger_differences(run.folder, folder / "straight", num_deaths)
    problems += differences(follower.told, straight, _LOSS_TOLERANCE)
    state, off = state_differences(run.folder, folder / "straight", last, _STATE_TOLERANCE)
    problems += state
    for problem in problems:
        print(f"WRONG  {problem}")
    if not problems:
        print(
            f"{sum(not one.missed for one in strikes)} faults of "
            f"{len({one.kind.name for one in strikes if not one.missed})} kinds in {last} steps: "
            f"losses off by {furthest(follower.told, straight):.1e} at most, the state by {off:.1e}"
        )
    if options.json:
        options.json.write_text(
            json.dumps([{**asdict(one), "kind": one.kind.name} for one in strikes], indent=1)
        )
    return not problems


def _line(strike: Strike) -> str:
    what = f"{strike.kind.words}, replica {strike.replica}, after step {strike.step}"
    if strike.missed:
        return f"{what}: not done, {strike.missed}"
    return f"{what}: {strike.recovery_s:.1f} s, {strike.repeated_steps} steps repeated"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos",
        description="Disturb a run with seeded faults, and compare it with one that nothing "
        "disturbs.",
        epilog="What follows -- is for train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--faults", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of what strikes whom and when")
    parser.add_argument("--replicas", type=int, default=2, help="default 2")
    parser.add_argument("--nproc-per-replica", type=int, default=1, help="default 1")
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        default=[],
        help="names with commas between them (default: all)",
    )
    parser.add_argument("--folder", type=Path, help="for all that the runs write, kept")
    parser.add_argument("--json", type=Path, help="file for what each fault has cost")
    parser.add_argument("--list", action="store_true", help="name all kinds")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
