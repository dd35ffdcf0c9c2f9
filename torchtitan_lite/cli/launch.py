"""`torchtitan-lite launch`. Imports no torch, because the launcher stays resident for the whole
run."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_lite.core.addresses import in_brackets, loopback_address
from torchtitan_lite.core.commands import torchtitan_lite, with_steps
from torchtitan_lite.core.errors import TRANSIENT, ConfigError, UserError, is_transient
from torchtitan_lite.core.outputs import LAUNCH_LOGS
from torchtitan_lite.core.run_lease import (
    RunLease,
    lease_places,
    supervised_instance,
    supervisor_environment,
    wait_until_free,
)
from torchtitan_lite.core.standard_streams import make_streams_patient
from torchtitan_lite.fault_tolerance.supervision.launcher import goodput
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan, training_plan
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import parse_ranks, refusal_in
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import RecordedView, open_view
from torchtitan_lite.fault_tolerance.supervision.local_ranks import check_process_count


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Launch the replicas; `arguments` are the arguments of `train`. Returns the exit status."""
    make_streams_patient()
    try:
        ranks = parse_ranks(options.nproc_per_replica)
        _check(options, ranks)
        plan = training_plan(
            arguments,
            num_replicas=options.replicas,
            ranks=ranks,
            num_spares=options.spares,
            slots_file=options.slots_file,
            regrow_after_s=options.regrow_after_s,
            lighthouse=options.lighthouse,
            min_replicas=options.min_replicas,
            max_restarts=options.max_restarts,
            max_restart_delay_s=options.max_restart_delay_s,
            grace_s=options.grace_s,
            host=in_brackets(options.bind or loopback_address()),
            log_dir=options.log_dir,
            check=check_ranks,
        )
        environment = supervisor_environment()
        plan = replace(plan, environment={**plan.environment, **environment})
        lease = _hold_folder(plan, supervised_instance(environment))
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return TRANSIENT if is_transient(error) else 2
    launcher = Launcher(plan, RecordedView(open_view(), plan.events_file))
    try:
        status = launcher.run()
    except OSError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    finally:
        lease.release()
    _print_end(plan, launcher, options, arguments)
    for failure in launcher.failures():
        print(failure, file=sys.stderr)
    return status


def _hold_folder(plan: LaunchPlan, instance: str) -> RunLease:
    """Hold the folder of the run from now on: of two launches at once, each could have the leases
    of some of the replicas. Raises FolderInUse."""
    for replica in range(plan.num_replicas):
        places = lease_places(plan.dump_folder, "", replica)
        wait_until_free(places, waits=plan.waits_for_folder, instance=instance)
    # Not renewed, because no thread may run while processes are started: for other machines, the
    # leases of the replicas follow it.
    lease = RunLease(
        lease_places(plan.dump_folder, "", None), instance, on_loss=lambda reason: None
    )
    lease.acquire(waits=plan.waits_for_folder, renews=False)
    return lease


def _print_end(
    plan: LaunchPlan,
    launcher: Launcher,
    options: argparse.Namespace,
    train_arguments: Sequence[str],
) -> None:
    """Print the same summary as a run without replicas at its end."""
    values = {
        number: goodput.read(plan.goodput_file(number)) for number in range(plan.num_replicas)
    }
    by_replica = {
        number: replica_goodput
        for number, replica_goodput in values.items()
        if replica_goodput is not None
    }
    lines = [
        f"replica {number}: {goodput.line(replica_goodput)}"
        for number, replica_goodput in by_replica.items()
    ]
    if by_replica:
        number, replica_goodput = next(iter(by_replica.items()))
        lines += ["", f"Replica {number}:", *goodput.table(replica_goodput)]
    lines += ["", *launcher.sample()]
    folder = plan.dump_folder
    steps = launcher.finished_steps
    arguments = list(train_arguments) if steps is None else with_steps(train_arguments, 2 * steps)
    command = [*torchtitan_lite(), "launch", *options.argv, "--", *arguments]
    lines += [
        f"Outputs      {folder}/ (replica_NNN/metrics.jsonl, {LAUNCH_LOGS}/)",
        f"Resume       {shlex.join(command)}",
        f"Report       {shlex.join([*torchtitan_lite(), 'report', str(folder)])}",
    ]
    print("\n".join(lines), flush=True)


def check_ranks(ranks: Sequence[int], arguments: Sequence[str]) -> str:
    """Validate the configuration in a process that imports torch. Returns why replicas cannot
    change their number of ranks in their processes; empty if they can. Raises ConfigError."""
    module = "torchtitan_lite.cli.rank_counts"
    numbers = ",".join(map(str, ranks))
    answer = subprocess.run(
        [sys.executable, "-m", module, numbers, "--", *arguments], capture_output=True, text=True
    )
    if answer.returncode:
        raise ConfigError(answer.stderr.strip() or f"{module} ended with {answer.returncode}.")
    return refusal_in(answer.stdout)


def _check(options: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Raise ConfigError if the options contradict each other or the resources of this machine."""
    if sys.platform != "linux":
        raise ConfigError(f"The launcher needs Linux, but this is {sys.platform}.")
    minimums = {
        "replicas": 1,
        "spares": 0,
        "min_replicas": 1,
        "max_restarts": 0,
        "grace_s": 0,
        "regrow_after_s": 0,
        "max_restart_delay_s": 0,
    }
    for name, minimum in minimums.items():
        value = getattr(options, name)
        if value < minimum:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {value}, but must be at least {minimum}.")
    check_process_count(
        options.replicas * (max(ranks) + options.spares),
        "--replicas, --nproc-per-replica and --spares",
    )
    if options.slots_file is not None and len(ranks) == 1:
        raise ConfigError(
            "--slots-file has no effect while every replica has one fixed number of processes: "
            "give --nproc-per-replica several, such as 1:4."
        )
    if options.min_replicas > options.replicas:
        raise ConfigError(
            f"--min-replicas is {options.min_replicas}, but there are {options.replicas} replicas, "
            "so no quorum could ever form: lower it, or start more."
        )
