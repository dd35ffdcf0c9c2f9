"""One rank of a run, from the mesh to the export."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torchtitan_lite.config import Config
from torchtitan_lite.core.output_fence import wait_for_outputs
from torchtitan_lite.core.preemption import StopRequest, stop_on_signals
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.fault_tolerance.supervision.agent.worker import RecoveryHooks
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.final_export import export_last_save
from torchtitan_lite.training.run_folder import hold_folder
from torchtitan_lite.training.summary import print_end, print_start, report_at_exit
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Job, StepReport, train


def run_rank(config: Config, argv: Sequence[str], recovery: RecoveryHooks | None) -> None:
    """Train as one rank of the world that the environment describes, or alone. `recovery` is that
    of a process which an agent supervises. Raises UserError."""
    device = detect_device(config.job.device)
    stop = StopRequest() if recovery is None else StopRequest(lambda: recovery.is_leaving)
    interruptible = recovery.interruptible if recovery else nullcontext
    with (
        start_mesh(config.parallelism, config.comm, device, config.job.dump_folder) as mesh,
        recovery.report_failure() if recovery else nullcontext(),
        hold_folder(config, mesh, stays=recovery is not None) as leases,
    ):
        with (
            build(config, mesh, stop, leases=leases) as built,
            # The process of an agent goes on after an error.
            nullcontext() if recovery else _errors_outlive_sigterm(),
            stop_on_signals(stop),
        ):
            if recovery is None or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                print_start(built, config)
            with report_at_exit(built), interruptible():
                finished = train(_reporting(built.job, recovery))
                wait_for_outputs()
            if recovery is not None:
                recovery.was_stopped = not finished
            print_end(built, config, argv, finished=finished)
        if finished and config.checkpoint.last_save_in_hf:
            root, folder = built.job.checkpoints.root, built.data.tokenizer_files.folder
            with interruptible():
                export_last_save(config, root, folder)


@contextmanager
def _errors_outlive_sigterm() -> Iterator[None]:
    """Ignore SIGTERM after an error in the block: a parent sends it to all ranks once one has
    failed, and must not cut short what this one reports, its traceback and its collectives."""
    try:
        yield
    except Exception:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


def _reporting(job: Job, recovery: RecoveryHooks | None) -> Job:
    """Return the job with a hook that reports its first committed step to the agent, if there is
    one."""
    if recovery is None:
        return job

    def hook(state: TrainState, report: StepReport) -> None:
        if report.committed:
            recovery.step_committed()

    return replace(job, hooks=[*job.hooks, hook])
