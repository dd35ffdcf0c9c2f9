"""Hooks after each step: metrics, goodput, validation. They read the state and never
modify it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.core.diagnosis import report_diagnosis
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data import ValidationData
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelCost, ModelSpec, PipelineSchedule
from torchtitan_lite.training.anomalies.process_checks import ProcessChecks
from torchtitan_lite.training.metrics import Event, GoodputTracker, Metrics, StepRecord
from torchtitan_lite.training.metrics.goodput import process_age_s
from torchtitan_lite.training.metrics.record import mfu
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Hook, StepReport
from torchtitan_lite.training.validation import validate


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """Parts of a run that a registered hook may use."""

    config: Config
    mesh: Mesh
    spec: ModelSpec
    metrics: Metrics
    folder: Path
    """Output folder of this rank's replica: `job.dump_folder`, or the replica's folder below it."""


def registered_hooks(context: HookContext) -> list[Hook]:
    """Create the hooks registered by a user's module, in order of registration. They are not called
    for an aborted step, which is retried."""
    return [_without_aborted(make(context)) for make in REGISTRY.hooks]


def _without_aborted(registered: Hook) -> Hook:
    def hook(state: TrainState, report: StepReport) -> None:
        if not report.aborted:
            registered(state, report)

    return hook


def metrics_hook(
    metrics: Metrics,
    mesh: Mesh,
    *,
    cost: ModelCost,
    goodput_tracker: GoodputTracker | None,
    total_steps: int,
) -> Hook:
    """Record each step, and the events `start` (once, after the first step of this process),
    `saved` and `saves_failed`."""

    failed_before = 0
    resumed_at: int | None = None

    def hook(state: TrainState, report: StepReport) -> None:
        nonlocal failed_before, resumed_at
        for event in report.events:
            metrics.event(Event(name=event.name, step=state.step, values=event.values))
        if report.aborted:
            # The step will be retried; there is nothing to record.
            return
        tokens_per_second = report.num_tokens / report.step_time_s
        num_devices = mesh.world_size * report.num_replicas
        metrics.step(
            StepRecord(
                step=report.number,
                loss=report.loss,
                grad_norm=report.grad_norm,
                lr=report.lr,
                tokens=state.tokens,
                num_target_tokens=report.num_target_tokens,
                tokens_per_second=tokens_per_second,
                mfu=mfu(
                    cost.flops_per_token, tokens_per_second, mesh.device.peak_flops, num_devices
                ),
                memory_gib=mesh.device.peak_memory_gib(),
                step_time_s=report.step_time_s,
                data_time_s=report.data_time_s,
                checkpoint_stall_s=report.checkpoint_stall_s,
                gc_time_s=report.gc_time_s,
                num_replicas=report.num_replicas,
                goodput=None if goodput_tracker is None else goodput_tracker.goodput(),
                router_load=busiest_experts(report.router_loads) or None,
                idle_experts=idle_experts(report.router_loads),
                skipped=not report.committed,
            )
        )
        if resumed_at is None:
            resumed_at = report.number - 1
            values = {
                "steps": total_steps,
                "parameters": cost.num_params,
                "active_parameters": cost.num_active_params,
                "ranks": mesh.world_size,
                "device": mesh.device.kind,
                "process_age_s": process_age_s(),
            }
            metrics.event(Event(name="start", step=report.number - 1, values=values))
        if report.saved_step != resumed_at:
            metrics.saved(report.saved_step, state.step)
        if report.failed_saves > max(failed_before, 1):
            values = {"in_a_row": report.failed_saves}
            metrics.event(Event(name="saves_failed", step=report.number, values=values))
        failed_before = report.failed_saves

    return hook


def goodput_hook(freq: int, goodput_tracker: GoodputTracker, metrics: Metrics) -> Hook:
    """Record the time accounting every `freq` steps."""

    def hook(state: TrainState, report: StepReport) -> None:
        if report.committed and state.step % freq == 0:
            values = goodput_tracker.totals().values()
            metrics.event(Event(name="time_accounting", step=state.step, values=values))

    return hook


def process_hook(checks: ProcessChecks) -> Hook:
    """Report what is wrong with the process of this rank."""

    def hook(state: TrainState, step: StepReport) -> None:
        for diagnosis in checks.check():
            report_diagnosis(diagnosis)

    return hook


def busiest_experts(loads: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the tokens of each router's busiest expert, as a multiple of the mean."""
    return {name: (load.max() / load.mean()).item() for name, load in loads.items()}


def idle_experts(loads: Mapping[str, torch.Tensor]) -> int | None:
    """Count the experts without any token, over all routers. None for a model without experts."""
    return sum(int((load == 0).sum()) for load in loads.values()) if loads else None


def validation_hook(
    freq: int,
    last_step: int,
    data: ValidationData,
    schedule: PipelineSchedule,
    metrics: Metrics,
    mesh: Mesh,
    sample: Callable[[TrainState], Sequence[str]] | None = None,
) -> Hook:
    """Measure the validation loss, and record the texts of `sample` if given, every `freq` steps
    and after the last one."""

    def hook(state: TrainState, report: StepReport) -> None:
        if report.committed and (state.step % freq == 0 or state.step == last_step):
            loss = validate(state.model, schedule, data, mesh).mean
            metrics.event(Event(name="validation", step=state.step, values={"loss": loss}))
            if sample is not None:
                texts = {str(number): text for number, text in enumerate(sample(state), 1)}
                metrics.event(Event(name="sample", step=state.step, values=texts))

    return hook
