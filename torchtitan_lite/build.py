"""The assembly: from a config to a `Job`. No loop is here. Layer: above hooks and
trainer."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchtitan_lite import rng
from torchtitan_lite.anomalies import Judge
from torchtitan_lite.checkpoint import CheckpointManager, run_on_all_ranks
from torchtitan_lite.checkpoint.hugging_face import save_assets
from torchtitan_lite.config import Config, likeness, to_record, to_toml
from torchtitan_lite.data import OpenedData, open_data
from torchtitan_lite.debug import (
    ScheduleInside,
    StepTrace,
    explicit_redistribution,
    traced_step,
)
from torchtitan_lite.errors import UserError
from torchtitan_lite.hooks import (
    HookContext,
    record_goodput,
    record_metrics,
    registered_hooks,
    validate_every,
    write_sample_ledger,
)
from torchtitan_lite.launcher.supervised import announce, is_restarted
from torchtitan_lite.log import logger
from torchtitan_lite.loss import cross_entropy
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.metrics import (
    Event,
    GoodputTracker,
    Metrics,
    open_goodput_tracker,
    open_metrics,
)
from torchtitan_lite.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.metrics.profiler import StepProfiler
from torchtitan_lite.models import model_spec
from torchtitan_lite.nn.initialize import give_memory, initialize, on_meta
from torchtitan_lite.optim import build_optimizer
from torchtitan_lite.optim import build_schedule as build_lr_schedule
from torchtitan_lite.outputs import replica_folder
from torchtitan_lite.parallel import build_schedule, parallelize
from torchtitan_lite.parallel.expert import RouterBalance, routers_of
from torchtitan_lite.parallel.fsdp import compute_dtype_of
from torchtitan_lite.parallel.pipeline_stages import join_stages, keep_only, plan_stages
from torchtitan_lite.parallel.tensor import check_plan
from torchtitan_lite.phases import Phase, PhaseListener, Phases
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.replica import SingleReplica, hang_listeners
from torchtitan_lite.samples import Sampler
from torchtitan_lite.spec import ModelSpec, Schedule
from torchtitan_lite.step.replay import TOLERANCE, NoReplay, Replay, StepReplay
from torchtitan_lite.step.work_times import WorkTimes
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import Hook, Job


@dataclass(frozen=True, kw_only=True)
class Built:
    """A job, and what its owner may want beside it."""

    job: Job
    spec: ModelSpec
    data: OpenedData
    metrics: Metrics
    goodput_tracker: GoodputTracker | None
    """The leader's."""
    restored_from: str | None
    """What the state was loaded from, if anything."""
    sampler: Sampler | None
    """The copy of the model that generates the texts of validations, if any are asked for."""


@contextmanager
def build(config: Config, mesh: Mesh, stop: StopRequest) -> Iterator[Built]:
    """Open the data, build the model on the mesh, restore the newest state, open the metrics;
    close what was opened at the end. Every rank must call it."""
    spec = model_spec(config.model)
    seed = config.debug.seed or 0
    if config.debug.deterministic:
        # cuBLAS reads it at its first call and is not deterministic without.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
    )
    rng.seed_everything(seed)
    dump_folder = Path(config.job.dump_folder)
    replica = config.fault_tolerance.replica_id if config.fault_tolerance.enable else None
    # What a replica saves belongs to all of them, what it says of itself does not.
    own_folder = dump_folder if replica is None else replica_folder(dump_folder, replica)
    run_on_all_ranks(lambda: _make_folder(own_folder))
    with ExitStack() as opened:
        goodput_tracker = _goodput_tracker(config, own_folder, opened) if mesh.is_leader else None
        phases = Phases(_phase_listeners(config, mesh, goodput_tracker, own_folder, opened))
        phases.enter(Phase.START, 0)
        announce("reading data")
        data = open_data(
            config.training,
            config.validation,
            hf_assets_path=config.model.hf_assets_path,
            vocab_size=spec.vocab_size,
            seed=seed,
            document_mask=spec.document_mask,
            pin_memory=mesh.device.pin_memory,
        )
        opened.callback(data.loader.close)
        announce("building model")
        parts = build_model(config, spec, mesh)
        model = join_stages(parts, spec, mesh)
        state = TrainState(
            model=model,
            optimizer=build_optimizer(config.optimizer, model, spec.no_decay, mesh.device),
            schedule=build_lr_schedule(
                config.lr_scheduler, config.optimizer, config.training.steps
            ),
            loader=data.loader,
        )
        averaging = None
        if config.fault_tolerance.enable and config.fault_tolerance.semi_sync_method:
            # Importing torchft takes a second.
            from torchtitan_lite.replica.semi_synchronous import Averaging

            averaging = Averaging(config.fault_tolerance, model)
            state.outer = averaging
        checkpoints = CheckpointManager(
            config.checkpoint,
            dump_folder=dump_folder,
            state=state,
            mesh=mesh,
            run_config=to_record(config),
            spec=spec,
            replica=replica,
            last_step=config.training.steps,
        )
        opened.callback(checkpoints.close)
        if config.checkpoint.enable and mesh.is_leader:
            save_assets(data.tokenizer_files.folder, checkpoints.root)
        announce("restoring")
        restored_from = checkpoints.restore()
        if averaging is not None and state.step == 0:
            # They may be pretrained.
            averaging.capture_initial_weights()
        is_resumed = restored_from is not None and not checkpoints.has_initial_load
        metrics = run_on_all_ranks(
            lambda: open_metrics(
                config.metrics,
                folder=own_folder,
                rank=mesh.rank,
                is_leader=mesh.is_leader,
                total_steps=config.training.steps,
                resume_step=state.step,
                continues=is_resumed or is_restarted(),
                run_config=config.model_dump(),
                world_size=mesh.world_size,
                replica=replica,
            )
        )
        opened.enter_context(metrics)
        compilation = config.compile
        loss_backend = compilation.backend if compilation.covers("loss") else None
        loss = cross_entropy(compile_backend=loss_backend)
        schedule = build_schedule(
            parts,
            spec,
            loss,
            mesh,
            config.parallelism,
            hidden_dtype=compute_dtype_of(config.training, mesh.device),
            is_compiled=compilation.covers("model"),
        )
        if config.debug.explicit_redistribution:
            schedule = ScheduleInside(schedule, explicit_redistribution(parts))
        step_context = nullcontext
        if config.debug.trace_communication:
            trace = StepTrace(
                parts,
                mesh,
                traced_step=traced_step(
                    config.debug.trace_communication_step,
                    resume_step=state.step,
                    last_step=config.training.steps,
                ),
                folder=own_folder,
                tensors=state.tensors,
            )
            schedule = ScheduleInside(schedule, trace.in_schedule)
            step_context = trace.step
        asks_for_texts = config.validation.enable and config.validation.samples > 0
        sampler = build_sampler(config, spec, data, mesh) if asks_for_texts else None
        global_batch_size = config.training.global_batch_size
        if global_batch_size == -1:
            global_batch_size = config.training.local_batch_size * mesh.degrees.batch
        job = Job(
            mesh=mesh,
            replicas=SingleReplica(),
            phases=phases,
            state=state,
            schedule=schedule,
            router_balance=RouterBalance(
                model,
                list(routers_of(model_on_meta(config, spec))),
                spec.num_experts,
                mesh,
                config.parallelism,
            ),
            checkpoints=checkpoints,
            garbage=opened.enter_context(
                ScheduledGarbageCollection(config.training.gc_freq, config.training.gc_debug)
            ),
            hooks=_hooks(
                config,
                opened,
                job_schedule=schedule,
                metrics=metrics,
                goodput_tracker=goodput_tracker,
                data=data,
                spec=spec,
                sampler=sampler,
                state=state,
                mesh=mesh,
                dump_folder=own_folder,
            ),
            stop=stop,
            steps=config.training.steps,
            global_batch_size=global_batch_size,
            # A pipeline is fed in microbatches of its own size.
            local_batch_size=(
                config.training.local_batch_size
                if mesh.degrees.pp == 1
                else config.parallelism.pipeline_parallel_microbatch_size
            ),
            seq_len=config.training.seq_len,
            max_norm=config.training.max_norm,
            work_times=WorkTimes(mesh, replica or 0),
            replay=_replay(config, state, schedule, mesh),
            judge=Judge(config.anomalies, config.debug.max_skipped_steps),
            train_timeout_s=config.comm.train_timeout_seconds,
            step_context=step_context,
        )
        if restored_from is not None and checkpoints.has_initial_load:
            logger.info("Initial weights loaded from %s", restored_from)
            values = {"folder": restored_from}
            metrics.event(Event(name="initial_load", step=state.step, values=values))
        elif restored_from is not None:
            logger.info("Resumed from %s at step %d", restored_from, state.step)
            values = {"folder": restored_from}
            metrics.event(Event(name="resume", step=state.step, values=values))
            if state.step >= job.steps:
                logger.info("All %d steps of this run are done.", job.steps)
        if mesh.is_leader:
            _write_config(config, own_folder)
        if replica is not None and state.step < job.steps:
            # Importing torchft takes a second.
            from torchtitan_lite.replica.joining import join
            from torchtitan_lite.replica.torchft_manager import filter_torchft_logs

            opened.enter_context(filter_torchft_logs())
            announce("joining")
            # The last thing of all: from here on the other replicas wait for this one.
            joined_replicas = join(
                config.fault_tolerance,
                state,
                mesh,
                config_fingerprint=likeness(config, mesh.world_size),
                newest_stored_step=checkpoints.newest_stored,
                wait_until_modifiable=checkpoints.wait_for_snapshot,
                stop_requested=lambda: stop.requested,
                initial_stored_step=checkpoints.stored_before,
                phases=phases,
                averaging=averaging,
            )
            job = replace(job, replicas=opened.enter_context(joined_replicas))
        announce("compiling" if config.compile.enable else "first step")
        yield Built(
            job=job,
            spec=spec,
            data=data,
            metrics=metrics,
            goodput_tracker=goodput_tracker,
            restored_from=restored_from,
            sampler=sampler,
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"job.dump_folder cannot be written: {error}. Choose another folder."
        ) from None


def build_model(
    config: Config, spec: ModelSpec, mesh: Mesh, *, draw: bool = True
) -> list[nn.Module]:
    """The parts of the model that this rank holds: one, or one for each of its stages of the
    pipeline. With their initial weights; or, without `draw`, with memory to load them into."""
    whole = model_on_meta(config, spec)
    check_plan(whole, spec)
    if config.model.print_after_conversion:
        logger.info("%s", whole)
    if mesh.degrees.pp == 1:
        return [_prepared(whole, config, spec, mesh, draw=draw)]
    plan = plan_stages(spec, config.parallelism)
    parts = []
    for stage in plan.of_rank(mesh.device_mesh.get_local_rank("pp")):
        part = model_on_meta(config, spec)
        keep_only(part, spec, plan.modules[stage])
        parts.append(_prepared(part, config, spec, mesh, draw=draw))
    return parts


def model_on_meta(config: Config, spec: ModelSpec) -> nn.Module:
    """The whole model, without memory."""
    return on_meta(spec.build, getattr(torch, config.training.dtype))


def _prepared(
    model: nn.Module, config: Config, spec: ModelSpec, mesh: Mesh, *, draw: bool
) -> nn.Module:
    """A model on the meta device, parallelized, in memory, and if `draw` with its initial
    weights."""
    parallelize(
        model,
        spec,
        mesh,
        parallelism=config.parallelism,
        precision=config.training,
        checkpointing=config.activation_checkpoint,
        compilation=config.compile,
        quantization=config.quantize.linear.float8 if config.model.converters else None,
    )
    device = mesh.device.torch_device
    offloaded = config.training.enable_cpu_offload
    give_memory(model, torch.device("cpu") if offloaded else device, buffer_device=device)
    if draw:
        initialize(model, spec.init, config.debug.seed or 0)
    return model.train()


def _replay(config: Config, state: TrainState, schedule: Schedule, mesh: Mesh) -> Replay:
    if not config.fault_tolerance.replay_check:
        return NoReplay()
    exact = mesh.device.kind == "cpu" or config.debug.deterministic
    tolerance = 0.0 if exact else TOLERANCE
    return StepReplay(state.model, schedule, state.optimizer, mesh, tolerance=tolerance)


def _goodput_tracker(config: Config, folder: Path, opened: ExitStack) -> GoodputTracker:
    """Those of an earlier attempt, where this run is one that goes on."""
    resumes = config.checkpoint.enable or config.fault_tolerance.enable
    goodput_tracker = open_goodput_tracker(folder, resumes=resumes)
    opened.callback(goodput_tracker.close)
    return goodput_tracker


def _phase_listeners(
    config: Config,
    mesh: Mesh,
    goodput_tracker: GoodputTracker | None,
    folder: Path,
    opened: ExitStack,
) -> list[PhaseListener]:
    """Who is told what this rank is doing."""
    listeners: list[PhaseListener] = [] if goodput_tracker is None else [goodput_tracker]
    hang_timeout_s = config.fault_tolerance.hang_timeout_s
    if config.fault_tolerance.enable and hang_timeout_s > 0:
        traces = folder / config.comm.save_traces_folder
        listeners += opened.enter_context(hang_listeners(hang_timeout_s, mesh.rank, traces))
    return listeners


def _hooks(
    config: Config,
    opened: ExitStack,
    *,
    job_schedule,
    metrics: Metrics,
    goodput_tracker: GoodputTracker | None,
    data: OpenedData,
    spec: ModelSpec,
    sampler: Sampler | None,
    state: TrainState,
    mesh: Mesh,
    dump_folder: Path,
) -> list[Hook]:
    """What runs after each step, in this order."""
    cost = spec.cost(config.training.seq_len)
    hooks = [
        record_metrics(
            metrics,
            mesh,
            cost=cost,
            goodput_tracker=goodput_tracker,
            total_steps=config.training.steps,
        )
    ]
    if goodput_tracker is not None and config.checkpoint.enable:
        hooks.append(record_goodput(config.checkpoint.interval, goodput_tracker, metrics))
    if data.validation is not None:
        hooks.append(
            validate_every(
                config.validation.freq,
                config.training.steps,
                data.validation,
                job_schedule,
                metrics,
                mesh,
                _validation_samples(config, sampler),
            )
        )
    if config.debug.sample_ledger:
        path = dump_folder / f"samples_rank_{mesh.rank}.jsonl"
        hook, lines = write_sample_ledger(path, state.step)
        opened.callback(lines.close)
        hooks.append(hook)
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        profiler = opened.enter_context(
            StepProfiler(
                config.profiling,
                folder=dump_folder,
                rank=mesh.rank,
                resume_step=state.step,
                device_kind=mesh.device.kind,
            )
        )
        hooks.append(lambda state, report: profiler.step(report.number))
    context = HookContext(config=config, mesh=mesh, spec=spec, metrics=metrics, folder=dump_folder)
    return [*hooks, *registered_hooks(context)]


def build_sampler(config: Config, spec: ModelSpec, data: OpenedData, mesh: Mesh) -> Sampler:
    """Build the copy of the model that generates text. Every rank must call it. Raises ConfigError
    for a model that cannot."""
    whole = model_on_meta(config, spec)
    return Sampler(whole, spec, mesh, data.tokenizer(), seed=config.debug.seed or 0)


def _validation_samples(
    config: Config, sampler: Sampler | None
) -> Callable[[TrainState], Sequence[str]] | None:
    """Return what generates the texts of a validation; None without a sampler."""
    asked = config.validation
    if sampler is None:
        return None
    return partial(
        sampler.texts,
        prompt=asked.sample_prompt,
        count=asked.samples,
        max_new_tokens=asked.sample_tokens,
        temperature=asked.sample_temperature,
    )


def _write_config(config: Config, dump_folder: Path) -> None:
    """The resolved config beside the outputs."""
    dump_folder.mkdir(parents=True, exist_ok=True)
    text = to_toml(config)
    (dump_folder / "config.toml").write_text(text)
    if config.job.save_config_file:
        path = dump_folder / config.job.save_config_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if config.job.print_config:
        logger.info("Resolved config:\n%s", text)
