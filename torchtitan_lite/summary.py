"""What a run says at its end: what its time went into, a sample of the model, where the outputs
are, how to go on.

Layer: the top.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.build import Built
from torchtitan_lite.config import Config
from torchtitan_lite.errors import UserError
from torchtitan_lite.generate import generate, prompt_ids
from torchtitan_lite.metrics import Event
from torchtitan_lite.metrics.books import Accounts
from torchtitan_lite.metrics.console import clock

_SAMPLE_TOKENS = 80
_STEPS = "--training.steps"


@contextmanager
def last_words(built: Built) -> Iterator[None]:
    """Whatever ends the training in this block: what has happened last, an error too, and the
    books reach the metrics, and the leader prints the books."""
    metrics, job = built.metrics, built.job
    try:
        yield
    except UserError as error:
        _tell_news(built)
        metrics.event(Event(name="error", step=job.state.step, values={"reason": str(error)}))
        raise
    else:
        saved_step = job.checkpoints.saved_step
        if saved_step is not None:
            values = {"checkpoint_step": saved_step}
            metrics.event(Event(name="saved", step=job.state.step, values=values))
    finally:
        _tell_news(built)
        if built.books is not None:
            accounts = built.books.accounts()
            metrics.event(Event(name="books", step=job.state.step, values=accounts.values()))
            print("\n" + "\n".join(table(accounts)), flush=True)


def _tell_news(built: Built) -> None:
    """Of a step that was not finished, so that no hook was called."""
    for news in built.job.replicas.news():
        built.metrics.event(Event(name=news.name, step=built.job.state.step, values=news.values))


def table(accounts: Accounts) -> list[str]:
    """What the time went into, the largest first."""
    total_ns = max(1, sum(accounts.ns.values()))
    spent = sorted(((ns, kind) for kind, ns in accounts.ns.items() if ns), reverse=True)
    return [
        f"Goodput      {accounts.goodput:.1%} of {clock(accounts.wall_s)} since the first start",
        *(f"  {kind:<15}{ns / 1e9:>12,.1f} s{ns / total_ns:>8.1%}" for ns, kind in spent),
    ]


def say_goodbye(built: Built, config: Config, argv: Sequence[str], *, finished: bool) -> None:
    """Print the end of the run. `argv` are the arguments that it was started with. Every rank must
    call it, since the sample is made by all."""
    job = built.job
    lines = [""]
    if finished:
        lines += ["A sample of the model:", "", _indented(_sample(built, config)), ""]
    else:
        lines += [f"Left at step {job.state.step} of {job.steps}, as asked.", ""]
    folder = Path(config.job.dump_folder)
    lines.append(f"Outputs      {folder}/ (config.toml, metrics.jsonl)")
    if config.checkpoint.enable:
        lines.append(f"Checkpoints  {job.checkpoints.root}/")
        lines.append(
            f"Resume       {_resume_command(argv, job.mesh.world_size, job.steps, finished)}"
        )
    if config.metrics.enable_tensorboard:
        logs = folder / config.metrics.save_tb_folder
        lines.append(f"TensorBoard  {_program('tensorboard')} --logdir {logs}")
    if job.mesh.is_leader:
        print("\n".join(lines), flush=True)


def _sample(built: Built, config: Config) -> str:
    tokenizer = built.data.tokenizer()
    ids = generate(
        built.job.state.model,
        built.job.schedule,
        prompt_ids(tokenizer, ""),
        built.job.mesh,
        num_tokens=_SAMPLE_TOKENS,
        max_seq_len=config.training.seq_len,
        temperature=0.8,
        seed=config.debug.seed or 0,
        stop_id=tokenizer.eos_id,
    )
    return tokenizer.decode(ids)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _resume_command(argv: Sequence[str], world_size: int, steps: int, finished: bool) -> str:
    """The same command; a run that is finished needs more steps to go on."""
    arguments = list(argv)
    if finished:
        kept = [argument for argument in arguments if not argument.startswith(_STEPS + "=")]
        if _STEPS in kept:
            place = kept.index(_STEPS)
            del kept[place : place + 2]
        arguments = [*kept, _STEPS, str(2 * steps)]
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    launcher = [_program("torchrun"), "--nproc-per-node", str(local_size)]
    launcher = launcher if world_size > 1 else [_program("python")]
    return shlex.join([*launcher, "train.py", *arguments])


def _program(name: str) -> str:
    """The command that starts a program of this environment, which may not be on the PATH."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(beside) or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
