"""From a config to a `Job`: `build` opens the data and composes the builders of model, state and
job. No loop is here."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from torchtitan_lite.config import Config, to_toml
from torchtitan_lite.core import rng
from torchtitan_lite.core.diagnosis import recording_diagnoses, report_text
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import wait_for_outputs
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.outputs import output_folder
from torchtitan_lite.core.phases import PhaseListener, Phases
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.core.rank.supervised import announce, is_restarted
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data import OpenedData, open_data, share_streams_on_node
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.fault_tolerance.replica import hang_listeners
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.pipeline_stages import join_stages
from torchtitan_lite.training.builders.job import build_job
from torchtitan_lite.training.builders.model import (
    build_model,
    spec_on_device,
    with_counted_parameters,
)
from torchtitan_lite.training.builders.replicas import join_replicas
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.builders.samples import build_text_generator
from torchtitan_lite.training.builders.state import RestoredState, build_state
from torchtitan_lite.training.metrics import (
    Event,
    GoodputTracker,
    Metrics,
    open_goodput_tracker,
    open_metrics,
)
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.trainer import Job

__all__ = ["Built", "build", "build_model", "build_text_generator", "spec_on_device"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A job, and the parts of a run beside it."""

    job: Job
    spec: ModelSpec
    data: OpenedData
    metrics: Metrics
    goodput_tracker: GoodputTracker | None
    """Goodput tracker; on the leader only."""
    restored_from: str | None
    """Location of the loaded checkpoint or snapshot; None for new weights."""
    text_generator: TextGenerator | None
    """The copy of the model that generates text for validation, if configured."""
    faults: OutputFaults
    """Failures of output files."""


@contextmanager
def build(
    config: Config, mesh: Mesh, stop: StopRequest, *, leases: Sequence[str] = ()
) -> Iterator[Built]:
    """Open the data, build the model on the mesh, restore the newest state and open the metrics;
    close them at the end of the block. Saves require that no other machine has taken over
    `leases` (`run_folder.hold_folder`). Every rank must call it."""
    _set_determinism(config)
    spec = with_counted_parameters(spec_on_device(config, mesh.device), config)
    folder = output_folder(config.job.dump_folder, config.fault_tolerance.replica)
    run_on_all_ranks(lambda: _make_folder(folder))
    faults = OutputFaults(partial(report_text, rank=mesh.rank))
    state_check = StateCheck() if config.fault_tolerance.state_check else None
    with ExitStack() as stack:
        replica = config.fault_tolerance.replica
        stack.enter_context(recording_diagnoses(folder, mesh.rank, replica, faults))
        tracker = _open_goodput_tracker(config, folder, stack, faults) if mesh.is_leader else None
        listeners = _phase_listeners(config, mesh, tracker, folder, stack)
        phases = Phases(listeners if state_check is None else [*listeners, state_check])
        announce("reading data")
        data = _build_data(config, spec, mesh, stack)
        announce("building model")
        parts = build_model(config, spec, mesh)
        stages = join_stages(parts, spec, mesh)
        restored = build_state(config, spec, stages, data, mesh, leases=leases)
        stack.callback(restored.checkpoints.close)
        state = restored.state
        phases.follow(lambda: state.step)
        run = RunContext(
            config=config,
            identity=restored.checkpoints.identity,
            spec=spec,
            mesh=mesh,
            folder=folder,
            faults=faults,
            phases=phases,
            stack=stack,
        )
        if _has_unbuffered_outputs(config):
            wait_for_outputs()
        metrics = stack.enter_context(_open_metrics(run, restored))
        has_samples = config.validation.enable and config.validation.samples > 0
        text_generator = build_text_generator(config, spec, data, mesh) if has_samples else None
        job = build_job(
            run,
            stop,
            parts=parts,
            data=data,
            restored=restored,
            metrics=metrics,
            goodput_tracker=tracker,
            text_generator=text_generator,
            state_check=state_check,
        )
        _report_origin(restored, job, metrics)
        if mesh.is_leader:
            with faults.tolerating("config.toml"):
                _write_config(config, folder)
        if config.fault_tolerance.enable and state.step < job.steps:
            # The last action of all, because the other replicas wait for a replica that has joined.
            replicas = stack.enter_context(join_replicas(config, mesh, stop, restored, phases))
            job = replace(job, replicas=replicas)
        announce("compiling" if config.compile.enable else "first step")
        yield Built(
            job=job,
            spec=spec,
            data=data,
            metrics=metrics,
            goodput_tracker=tracker,
            restored_from=restored.restored_from,
            text_generator=text_generator,
            faults=faults,
        )


def _set_determinism(config: Config) -> None:
    if config.debug.deterministic:
        # cuBLAS reads it at its first call; without it, cuBLAS is not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Each call imports the compiler, half a second, and it is off in a new process.
    if config.debug.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(
            config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
        )
    rng.seed_everything(config.debug.seed or 0)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_restarted():
            # The run has begun; its outputs are recorded as failing.
            return
        raise UserError(
            f"job.dump_folder cannot be written: {error}. Choose another folder."
        ) from None


def _open_goodput_tracker(
    config: Config, folder: Path, stack: ExitStack, faults: OutputFaults
) -> GoodputTracker:
    """Continue the record of an earlier generation if the run can resume."""
    resumes = config.checkpoint.enable or config.fault_tolerance.enable
    tracker = open_goodput_tracker(folder, resumes=resumes, faults=faults)
    stack.callback(tracker.close)
    return tracker


def _phase_listeners(
    config: Config, mesh: Mesh, tracker: GoodputTracker | None, folder: Path, stack: ExitStack
) -> list[PhaseListener]:
    listeners: list[PhaseListener] = [] if tracker is None else [tracker]
    hang_timeout_s = config.fault_tolerance.hang_timeout_s
    if config.fault_tolerance.enable:
        traces = folder / config.comm.save_traces_folder
        listeners += stack.enter_context(hang_listeners(hang_timeout_s, mesh.rank, traces))
    return listeners


def _build_data(config: Config, spec: ModelSpec, mesh: Mesh, stack: ExitStack) -> OpenedData:
    node = None
    if any(corpus.streaming for corpus in config.training.resolved_corpora()):
        node = share_streams_on_node()
    if node is not None:
        stack.enter_context(node)
    data = open_data(
        config.training,
        config.validation,
        hf_assets_path=config.model.hf_assets_path,
        vocab_size=spec.vocab_size,
        seed=config.debug.seed or 0,
        document_mask=spec.document_mask,
        pin_memory=mesh.device.pin_memory,
        node=node,
    )
    stack.callback(data.loader.close)
    if node is not None:
        stack.callback(node.stop)
    return data


def _has_unbuffered_outputs(config: Config) -> bool:
    """Return whether the run has outputs that can neither wait in memory nor be delayed: replicas
    commit steps together, and the others are read while it trains, or written by users' code."""
    metrics, profiling = config.metrics, config.profiling
    return bool(
        config.fault_tolerance.enable
        or config.publish.enable
        or metrics.enable_wandb
        or metrics.prometheus_port
        or config.debug.sample_ledger
        or config.debug.trace_communication
        or profiling.enable_profiling
        or profiling.enable_memory_snapshot
        or REGISTRY.hooks
        or REGISTRY.sinks
    )


def _open_metrics(run: RunContext, restored: RestoredState) -> Metrics:
    config, mesh = run.config, run.mesh
    return run_on_all_ranks(
        lambda: open_metrics(
            config.metrics,
            folder=run.folder,
            rank=mesh.rank,
            is_leader=mesh.is_leader,
            total_steps=config.training.steps,
            resume_step=restored.state.step,
            continues=restored.is_resumed or is_restarted(),
            run_config=config.model_dump(),
            world_size=mesh.world_size,
            replica=config.fault_tolerance.replica,
            faults=run.faults,
        )
    )


def _report_origin(restored: RestoredState, job: Job, metrics: Metrics) -> None:
    """Report where the state comes from."""
    where, step = restored.restored_from, restored.state.step
    if where is None:
        return
    if restored.is_resumed:
        logger.info("Resumed from %s at step %d", where, step)
    else:
        logger.info("Initial weights loaded from %s", where)
    name = "resume" if restored.is_resumed else "initial_load"
    metrics.event(Event(name=name, step=step, values={"folder": where}))
    if restored.is_resumed and step >= job.steps:
        logger.info("All %d steps of this run are done.", job.steps)


def _write_config(config: Config, folder: Path) -> None:
    """Write the resolved config beside the outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    text = to_toml(config)
    (folder / "config.toml").write_text(text)
    if config.job.save_config_file:
        path = folder / config.job.save_config_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if config.job.print_config:
        logger.info("Resolved config:\n%s", text)
