"""Metrics: the records and events of a run.

`open_metrics` opens the sinks configured in `[metrics]`; the loop passes a `StepRecord` per step to
them. Metrics read and never change the run, and no call of theirs waits for another rank. Heavy
packages (TensorBoard, rich, wandb, prometheus_client, the profiler) are imported on first use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.core.optional_dependencies import require
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.outputs import METRICS
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.training.metrics.console import open_console
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.training.metrics.goodput import GoodputTracker, open_goodput_tracker
from torchtitan_lite.training.metrics.jsonl import JsonLines
from torchtitan_lite.training.metrics.profiler import StepProfiler
from torchtitan_lite.training.metrics.prometheus import Prometheus
from torchtitan_lite.training.metrics.record import Event, StepRecord, mfu
from torchtitan_lite.training.metrics.sink import Cadence, Sink
from torchtitan_lite.training.metrics.tensorboard import TensorBoard
from torchtitan_lite.training.metrics.wandb import WeightsAndBiases

__all__ = [
    "Event",
    "GoodputTracker",
    "Metrics",
    "ScheduledGarbageCollection",
    "SinkContext",
    "StepProfiler",
    "StepRecord",
    "mfu",
    "open_goodput_tracker",
    "open_metrics",
]


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """The parts of a run that a registered metrics sink may use."""

    folder: Path
    """Output folder of this rank's replica."""
    resume_step: int
    """The last step of the state that training starts from; 0 if there is no saved state."""
    continues: bool
    """Whether the run continues the one that wrote the files in `folder`, also if it starts again
    with `resume_step` 0; if not, they belong to another run."""
    total_steps: int
    run_config: Mapping[str, Any]
    """The resolved configuration."""


class Metrics:
    """The open sinks of this rank, created by `open_metrics`; a context manager that closes them.

    A sink that raises OSError loses the record; nothing else happens. The event `outputs_failed`
    follows when all outputs of the run work again.
    """

    def __init__(
        self,
        every_step: Sequence[Sink],
        when_due: Sequence[Sink],
        cadence: Cadence,
        faults: OutputFaults | None = None,
    ):
        self._every_step = every_step
        self._when_due = when_due
        self._cadence = cadence
        self._faults = faults or OutputFaults()
        self._saved_step: int | None = None
        self._is_closed = False

    def step(self, record: StepRecord) -> None:
        """Record a completed step."""
        for sink in self._every_step:
            self._guarded(sink, lambda sink=sink: sink.step(record))
        if self._cadence.is_due(record.step):
            for sink in self._when_due:
                self._guarded(sink, lambda sink=sink: sink.step(record))
        self.report_outages(record.step)

    def event(self, event: Event) -> None:
        """Record an event."""
        for sink in (*self._every_step, *self._when_due):
            self._guarded(sink, lambda sink=sink: sink.event(event))

    def _guarded(self, sink: Sink, record: Callable[[], None]) -> None:
        name = type(sink).__name__
        try:
            record()
        except OSError as error:
            self._faults.failed(name, error, lost=1)
        else:
            self._faults.works(name)

    def report_outages(self, step: int) -> None:
        """Record the outages of outputs that have ended since the last call."""
        for values in self._faults.ended_outages():
            self.event(Event(name="outputs_failed", step=step, values=values))

    def saved(self, checkpoint_step: int | None, step: int) -> None:
        """Record that the checkpoint of `checkpoint_step` (None: there is none) is durable after
        `step`, unless the newest `saved` event has already recorded it."""
        if checkpoint_step not in (None, self._saved_step):
            self._saved_step = checkpoint_step
            values = {"checkpoint_step": checkpoint_step}
            self.event(Event(name="saved", step=step, values=values))

    def close(self) -> None:
        """Close every sink. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for sink in (*self._every_step, *self._when_due):
                self._guarded(sink, sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_metrics(
    config: MetricsConfig,
    *,
    folder: Path,
    rank: int,
    is_leader: bool,
    total_steps: int,
    resume_step: int,
    continues: bool | None = None,
    run_config: Mapping[str, Any],
    world_size: int = 1,
    replica: int | None = None,
    faults: OutputFaults | None = None,
) -> Metrics:
    """Open the sinks of this rank: on the leader `folder/metrics.jsonl`, the console and those
    enabled in `config`; on the others nothing, or the same files with the rank in their names if
    `config.save_for_all_ranks`.

    `resume_step` is the last step of the state from which training starts, 0 for a fresh run. A run
    that `continues` the one whose files are there (if omitted: one that resumes) drops their
    records after that step; any other run keeps them under another name. Weights & Biases shows
    `run_config`. `world_size` (ranks per replica) and `replica` (None without replicas) determine
    the Prometheus port of each rank. `faults` records failures of disks. Raises UserError
    if wandb or prometheus_client is needed and missing, on every rank, and if the port for
    Prometheus cannot be opened.
    """
    if config.enable_wandb:
        require("wandb", "metrics.enable_wandb = true")
    if config.prometheus_port:
        require("prometheus_client", f"metrics.prometheus_port = {config.prometheus_port}")
    faults = faults or OutputFaults()
    continues = resume_step > 0 if continues is None else continues
    cadence = Cadence(log_freq=config.log_freq, first_step=resume_step + 1, last_step=total_steps)
    every_step: list[Sink] = []
    when_due: list[Sink] = []
    if is_leader or config.save_for_all_ranks:
        label = "" if is_leader else f"rank_{rank}"
        name = METRICS if is_leader else f"metrics_{label}.jsonl"
        if config.enable_wandb:
            when_due.append(
                WeightsAndBiases(
                    folder / label,
                    resume_step=resume_step,
                    run_config=run_config,
                    label=label,
                )
            )
        if config.prometheus_port:
            every_step.append(Prometheus(config, rank=rank, world_size=world_size, replica=replica))
        every_step.append(JsonLines(folder / name, resume_step, continues=continues, faults=faults))
        if config.enable_tensorboard:
            when_due.append(
                TensorBoard(folder / config.save_tb_folder / label, resume_step, faults)
            )
    if is_leader:
        context = SinkContext(
            folder=folder,
            resume_step=resume_step,
            continues=continues,
            total_steps=total_steps,
            run_config=run_config,
        )
        every_step += [make(context) for make in REGISTRY.sinks]
        every_step.append(open_console(cadence, color=not config.disable_color_printing))
    return Metrics(every_step, when_due, cadence, faults)
