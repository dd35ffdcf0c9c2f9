"""Summaries of a run at its start (model, mesh, data) and at its end (goodput, a sample of the
model, outputs, how to resume)."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.config import Config
from torchtitan_lite.core.commands import program, torchtitan_lite, with_steps
from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.core.log import logger, warn_on_rank_0, wrapped
from torchtitan_lite.core.outputs import SAMPLE, output_folder
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID
from torchtitan_lite.data.chat_prompt import ChatPrompt
from torchtitan_lite.distributed.mesh import AXES
from torchtitan_lite.fault_tolerance.supervision.launcher import goodput
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import start_command
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.training.builders import Built, build_text_generator
from torchtitan_lite.training.builders.samples import sample_prompt
from torchtitan_lite.training.metrics import Event

_SAMPLE_MAX_PARAMS = 2_000_000_000
"""A generating copy of a larger model might not fit into memory next to the training state."""


def print_start(built: Built, config: Config) -> None:
    """Print model, mesh, batch and initial state, on the leader."""
    job = built.job
    if job.mesh.is_leader:
        rows = start_rows(built, config)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        lines = (wrapped(f"{name:<13}{value}", width) for name, value in rows.items())
        print("\n".join(lines), flush=True)


def start_rows(built: Built, config: Config) -> dict[str, str]:
    """Return what `print_start` prints, by name."""
    job, mesh, spec = built.job, built.job.mesh, built.spec
    cost = spec.cost(config.training.seq_len)
    active = ""
    if cost.num_active_params != cost.num_params:
        active = f" ({cost.num_active_params:,} active)"
    degrees = {axis: getattr(mesh.degrees, axis) for axis in (*AXES, "ep", "etp")}
    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    processes = f"{mesh.world_size} process{'es' * (mesh.world_size > 1)}"
    if config.fault_tolerance.enable:
        processes += f" in replica {config.fault_tolerance.replica_id}"
    compute = str(precision_policy(config.training, mesh.device).compute).removeprefix("torch.")
    stored = config.training.dtype
    dtype = stored if compute == stored else f"{stored} parameters, {compute} compute"
    sizes = job.batch_sizes
    warmup = "".join(f"{size:,} until sample {end:,}, then " for end, size in sizes.stages)
    return {
        "Model": f"{spec.name} {spec.flavor}, {cost.num_params:,} parameters{active}",
        "Mesh": f"{processes}{': ' if axes else ''}{axes}",
        "Device": f"{mesh.device.kind}, {dtype}",
        "Global batch": f"{warmup}{sizes.final:,} samples x {job.seq_len:,} tokens = "
        f"{sizes.final * job.seq_len:,} tokens per step",
        "Steps": f"{job.state.step:,} of {job.steps:,} done",
        "State": _origin(built),
    }


def _origin(built: Built) -> str:
    where, base = built.restored_from, built.job.state.base
    beside = "" if base is None else f" beside the frozen weights of {base.path}"
    if where is None:
        drawn = "initial weights" if base is None else "adapters"
        return f"new, with {drawn} drawn from the seed{beside}"
    if built.job.checkpoints.has_initial_load:
        part = "the whole state of" if built.job.state.step else "initial weights from"
        return f"new, with {part} {where}"
    return f"resumed from {where}{beside}"


@contextmanager
def report_at_exit(built: Built) -> Iterator[None]:
    """On exit from this block: record the last events, including an error, close the metrics,
    and print the goodput on the leader."""
    metrics, job = built.metrics, built.job
    try:
        yield
    except UserError as error:
        _record_events(built)
        metrics.event(Event(name="error", step=job.state.step, values={"reason": str(error)}))
        raise
    else:
        metrics.saved(job.checkpoints.saved_step, job.state.step)
    finally:
        _record_events(built)
        values = None if built.goodput_tracker is None else built.goodput_tracker.totals().values()
        if values is not None:
            metrics.event(Event(name="time_accounting", step=job.state.step, values=values))
        metrics.report_outages(job.state.step)
        # The live bar wraps long lines, which makes them hard to copy.
        metrics.close()
        if values is not None:
            print("\n" + "\n".join(goodput.table(values)), flush=True)
        for line in built.faults.summary():
            logger.warning("%s", line)


def _record_events(built: Built) -> None:
    """Record the events of an unfinished step, for which no hook was called."""
    for event in built.job.replicas.events():
        built.metrics.event(Event(name=event.name, step=built.job.state.step, values=event.values))


def print_end(built: Built, config: Config, argv: Sequence[str], *, finished: bool) -> None:
    """Print the end of the run. `argv` are its command-line arguments. Every rank must call it,
    because all ranks generate the sample."""
    job = built.job
    lines = [""]
    if finished:
        lines += _sample_lines(built, config)
    else:
        lines += [f"Stopped at step {job.state.step} of {job.steps} on request.", ""]
    folder = Path(config.job.dump_folder)
    own = output_folder(config.job.dump_folder, config.fault_tolerance.replica)
    lines.append(f"Outputs      {own}/ (config.toml, metrics.jsonl)")
    if config.checkpoint.enable:
        lines.append(f"Checkpoints  {job.checkpoints.root}/")
    if config.checkpoint.enable and LAUNCHER_PID not in os.environ:
        # A finished run needs more steps to continue.
        more = 2 * max(job.steps, job.state.step)
        arguments = with_steps(argv, more) if finished else list(argv)
        lines.append(f"Resume       {shlex.join(start_command(arguments, job.mesh.world_size))}")
    lines.append(f"Report       {shlex.join([*torchtitan_lite(), 'report', str(folder)])}")
    if config.metrics.enable_tensorboard:
        logs = own / config.metrics.save_tb_folder
        lines.append(f"TensorBoard  {program('tensorboard')} --logdir {logs}")
    if job.mesh.is_leader:
        print("\n".join(lines), flush=True)


def _sample_lines(built: Built, config: Config) -> list[str]:
    """Return the lines of a sample; empty if there is none. The run has finished and is saved, so
    that whatever goes wrong is only reported."""
    try:
        prompt = sample_prompt(config, built.data, "")
        text = None if prompt is None else _sample(built, config, prompt)
    except Exception as error:
        warn_on_rank_0("No sample of the model: %s: %s", type(error).__name__, error)
        return []
    if prompt is None or text is None:
        return []
    if isinstance(prompt, str):
        return [SAMPLE, "", _indented(text), ""]
    asked = [
        _indented(f"{message['role']}: {message.get('content', '')}") for message in prompt.messages
    ]
    return [SAMPLE, "", *asked, _indented(f"assistant: {text}"), ""]


def _sample(built: Built, config: Config, prompt: str | ChatPrompt) -> str | None:
    """Generate a text; None if the model is too large or has no KV cache."""
    job, spec = built.job, built.spec
    generator = built.text_generator
    if generator is None:
        if spec.cost(config.training.seq_len).num_params > _SAMPLE_MAX_PARAMS:
            return None
        try:
            generator = build_text_generator(config, spec, built.data, job.mesh)
        except ConfigError:
            return None
    (text,) = generator.texts(
        job.state,
        prompt=prompt,
        count=1,
        max_new_tokens=config.validation.sample_tokens,
        temperature=config.validation.sample_temperature,
    )
    return text


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
