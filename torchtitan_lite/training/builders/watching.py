"""Build what watches and records each step: its monitor and the ledger of its samples."""

import os

from torchtitan_lite.core.outputs import sample_ledger
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID, is_restarted
from torchtitan_lite.distributed.torch_compat import collective_waits
from torchtitan_lite.nn.spec import PipelineSchedule
from torchtitan_lite.training.anomalies import AnomalyDetector
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.builders.state import RestoredState
from torchtitan_lite.training.metrics.sample_ledger import NoLedger, SampleLedger, StepLedger
from torchtitan_lite.training.step.monitor import StepMonitor
from torchtitan_lite.training.step.replay import TOLERANCE, Replay
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.step.work_times import WorkTimes
from torchtitan_lite.training.train_state import TrainState


def build_monitor(
    run: RunContext,
    state: TrainState,
    schedule: PipelineSchedule,
    state_check: StateCheck | None,
) -> StepMonitor:
    """Build the monitor of the numbers and times of each step."""
    config, mesh = run.config, run.mesh
    replay = None
    if config.fault_tolerance.replay_check:
        is_exact = mesh.device.kind == "cpu" or config.debug.deterministic
        tolerance = 0.0 if is_exact else TOLERANCE
        replay = Replay(state.model, schedule, state.optimizer, mesh, tolerance=tolerance)
    detector = AnomalyDetector(config.anomalies, config.debug.max_skipped_steps)
    waits = None
    if mesh.device.kind == "cpu":
        # On a GPU the stream waits, and not the host.
        waits = run.stack.enter_context(collective_waits())
    work_times = WorkTimes(mesh, config.fault_tolerance.replica or 0, waits)
    return StepMonitor(detector, work_times, replay, run.phases, mesh, state_check)


def open_ledger(run: RunContext, restored: RestoredState) -> StepLedger:
    """Open the ledger of this rank's samples, if it is configured."""
    config, mesh = run.config, run.mesh
    if not config.debug.sample_ledger:
        return NoLedger()
    # Without the launcher it is unknown whether a replica that begins anew joins a run.
    by_hand = config.fault_tolerance.enable and LAUNCHER_PID not in os.environ
    ledger = SampleLedger(
        sample_ledger(run.folder, mesh.rank),
        run.faults,
        continues=restored.is_resumed or is_restarted() or by_hand,
        generation_id=run.identity.generation_id,
        step=restored.state.step,
        cursor=restored.state.cursor,
        rank=mesh.rank,
        batch_rank=mesh.batch_rank,
    )
    run.stack.callback(ledger.close)
    return ledger
