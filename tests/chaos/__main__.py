"""Disturb a run with seeded faults of all kinds, and compare it with an undisturbed run.

python -m tests.chaos --faults 200 [--seed 0] [--kinds rank_killed,...] [-- ARGUMENTS]
python -m tests.chaos --list

ARGUMENTS are arguments of train.py; by default, the debug config is trained in float64. Replicas
run under the launcher on this machine. Faults are injected one after the other, and the run must
recover from each. The exit status is 0 if the run recovers and every loss, the target tokens and
samples of every step and the final state equal those of an undisturbed run; 1 if not; 2 if the
command line is invalid. The summary has the cost of each kind of fault, and the memory of the
processes at the start and the end, with the growth of a trainer per quorum change.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.chaos.comparison import (
    UndisturbedRunFailed,
    largest_loss_difference,
    newest_checkpoint_step,
    sample_differences,
    state_differences,
    step_differences,
    undisturbed_run,
)
from tests.chaos.disturbed_run import (
    DisturbedRun,
    DisturbedRunFailed,
    InjectedFault,
    JobSpec,
    cost_table,
    draw_kinds,
)
from tests.chaos.faults import FAULT_KINDS, FaultKind
from tests.chaos.job_view import MetricsFollower, processes_using
from tests.chaos.memory import MemoryRecord

_ENDLESS = 1_000_000
_LOSS_TOLERANCE = 1e-8
"""Relative, in float64: the number of replicas changes the order of summation."""
_MAX_REPEATED_STEPS = 6
"""Limit per fault, summed over all replicas."""
_STATE_TOLERANCE = 1e-6
"""Relative to the largest element of a tensor. AdamW divides by small second moments."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    separator = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:separator])
    if options.list:
        print("\n".join(sorted(FAULT_KINDS)))
        return 0
    unknown = sorted(set(options.kinds) - FAULT_KINDS.keys())
    if unknown:
        print(f"chaos: unknown kinds {unknown}: --list shows all kinds", file=sys.stderr)
        return 2
    kinds = [FAULT_KINDS[name] for name in options.kinds or sorted(FAULT_KINDS)]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    arguments = [
        *(argv[separator + 1 :] or _default_arguments(options.nproc_per_replica)),
        # The learning rate must not depend on where the runs end.
        f"--lr_scheduler.total_steps={_ENDLESS}",
        "--debug.sample_ledger=true",
    ]
    passed = disturb(arguments, folder, kinds, options)
    if passed and options.folder is None:
        shutil.rmtree(folder)
    elif not passed:
        print(f"The outputs of both runs are in {folder}.")
    return 0 if passed else 1


def _default_arguments(num_ranks: int) -> list[str]:
    """Return the arguments for replicas of `num_ranks` ranks."""
    local_batch = 2
    return [
        "--config=configs/llama3_debug_ft.toml",
        "--training.dtype=float64",
        "--training.seq_len=64",
        f"--training.local_batch_size={local_batch}",
        # Three micro-batches, which two replicas cannot split evenly.
        f"--training.global_batch_size={3 * local_batch * num_ranks}",
        # A large learning rate would amplify rounding differences.
        "--optimizer.lr=1e-4",
        "--checkpoint.interval=40",
        "--validation.enable=false",
        "--metrics.enable_tensorboard=false",
    ]


def disturb(
    arguments: Sequence[str],
    folder: Path,
    kinds: Sequence[FaultKind],
    options: argparse.Namespace,
) -> bool:
    """Disturb a run in `folder` and return whether it passed the comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = JobSpec(
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
        launch_options=[
            "--max-restarts=1000",
            "--max-restart-delay-s=1",
            f"--spares={options.spares}",
        ],
    )
    faults: list[InjectedFault] = []
    problems: list[str] = []
    memory, usage = MemoryRecord(), []
    with MetricsFollower(spec.folder, spec.num_replicas) as follower:
        try:
            with DisturbedRun(spec, follower, folder / "launch.log", options.seed) as run:
                run.wait_for_all()
                memory.sample(run.job)
                for number, kind in enumerate(draw_kinds(kinds, options.faults, options.seed), 1):
                    faults.append(run.inject(kind))
                    print(f"{number:4}/{options.faults}  {_line(faults[-1])}", flush=True)
                    memory.sample(run.job)
                usage = [*memory.summary(run.job), _size_of_logs(spec.folder)]
                status = run.stop()
                if status:
                    problems.append(f"the launcher exited with status {status}")
                problems += [f"process left behind: {one}" for one in processes_using(spec.folder)]
        except DisturbedRunFailed as error:
            print(error, file=sys.stderr)
            return False
    for line in (*cost_table(faults), *usage):
        print(line)
    last = newest_checkpoint_step(spec.folder)
    reference_folder = folder / "undisturbed"
    try:
        reference = undisturbed_run(arguments, reference_folder, last)
    except UndisturbedRunFailed as error:
        print(f"The undisturbed run failed:\n{error}", file=sys.stderr)
        return False
    problems += [f"not injected: {_line(fault)}" for fault in faults if fault.skip_reason]
    problems += [
        f"more than {_MAX_REPEATED_STEPS} repeated steps: {_line(fault)}"
        for fault in faults
        if fault.repeated_steps > _MAX_REPEATED_STEPS
    ]
    problems += sample_differences(spec.folder, reference_folder)
    problems += step_differences(follower.steps, reference, _LOSS_TOLERANCE)
    state_problems, state_difference = state_differences(
        spec.folder, reference_folder, last, _STATE_TOLERANCE
    )
    problems += state_problems
    for problem in problems:
        print(f"FAILED  {problem}")
    if not problems:
        loss_difference = largest_loss_difference(follower.steps, reference)
        print(
            f"{len(faults)} faults of {len({fault.kind.name for fault in faults})} kinds in {last} "
            f"steps: losses differ by at most {loss_difference:.1e}, the final state by "
            f"{state_difference:.1e}"
        )
    if options.json:
        options.json.write_text(
            json.dumps([{**asdict(fault), "kind": fault.kind.name} for fault in faults], indent=1)
        )
    return not problems


def _size_of_logs(folder: Path) -> str:
    sizes = [path.stat().st_size for path in (folder / "launch_logs").rglob("*") if path.is_file()]
    return f"{len(sizes)} logs of {sum(sizes) / 2**20:.1f} MiB"


def _line(fault: InjectedFault) -> str:
    description = f"{fault.kind.label}, replica {fault.replica}, after step {fault.step}"
    if fault.skip_reason:
        return f"{description}: not injected, {fault.skip_reason}"
    return f"{description}: {fault.recovery_s:.1f} s, {fault.repeated_steps} steps repeated"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Disturb a run with seeded faults, and compare it with an undisturbed run.",
        epilog="Arguments after -- are passed to train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--faults", type=int, default=50, help="number of faults (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    parser.add_argument("--replicas", type=int, default=2, help="default 2")
    parser.add_argument("--nproc-per-replica", type=int, default=1, help="default 1")
    parser.add_argument("--spares", type=int, default=0, help="per replica (default 0)")
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        default=[],
        help="comma-separated kinds of faults (default: all)",
    )
    parser.add_argument("--folder", type=Path, help="folder for all outputs of the runs, kept")
    parser.add_argument("--json", type=Path, help="file for the cost of each fault")
    parser.add_argument("--list", action="store_true", help="list all kinds")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
