"""One rank of the comparison of steps: the trainer and the hand-written loop, taking turns.

Both live in the same process and take turns of a few steps each: the trainer trains through its
own `train`, and a last hook lends the process to the hand-written loop at the end of each turn.
That is fairer than a process for each side: what changes with time or from process to process (the
machine's clock and neighbours, where memory came to lie) is the same for both, and cancels in
the ratio. It costs the trainer nothing, since all that a turn of the trainer takes, threads
that read ahead included, is CPU time of this process. Automatic garbage collection is off for both,
as the trainer wants it; what the trainer's own collection takes is counted for the trainer alone.

Started by `benchmarks.step`, on its own or by torchrun, with the trainer's own arguments.
"""

import argparse
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks import hand_written_step
from benchmarks.hand_written_step import Batch, Recipe
from torchtitan_lite.build import Built, build
from torchtitan_lite.config import Config, check_against, parse_command_line
from torchtitan_lite.data import share_of_step
from torchtitan_lite.device import detect_device
from torchtitan_lite.log import configure_logging
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.parallel.blocks import blocks_of
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import StepReport, train


@dataclass(kw_only=True)
class Side:
    """What was measured of one side on this rank."""

    dtype: str
    threads: int
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each turn; the first one is the warm-up."""
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """After how many steps the sides take turns."""

    warmup_steps: int
    steps: int
    count: int

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps * self.count

    def ends_after(self, step: int) -> bool:
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.steps == 0


class HandWritten:
    """The hand-written loop, on the trainer's samples, weights and learning rates."""

    def __init__(self, config: Config, built: Built, turns: Turns) -> None:
        job, mesh = built.job, built.job.mesh
        self._max_norm = job.max_norm
        self._world_size = mesh.world_size
        self._batches = _batches(built, turns.total_steps)
        self._lrs = [job.state.schedule.lr(step) for step in range(turns.total_steps)]
        self.model = built.spec.build().to(mesh.device.torch_device)
        initialize(self.model, built.spec.init, config.debug.seed or 0)
        if mesh.world_size > 1:
            hand_written_step.shard(self.model, blocks_of(self.model, built.spec))
        self._optimizer = hand_written_step.adamw(self.model, recipe_of(config))
        self._next = 0

    def take(self, num_steps: int) -> list[float]:
        """Take the next steps. Returns their losses."""
        losses = []
        for number in range(self._next, self._next + num_steps):
            loss = hand_written_step.step(
                self.model,
                self._optimizer,
                self._batches[number],
                lr=self._lrs[number],
                max_norm=self._max_norm,
                world_size=self._world_size,
            )
            losses.append(loss)
        self._next += num_steps
        return losses


class Alternation:
    """The trainer's last hook: keeps the times, and hands the turn over and back."""

    def __init__(self, turns: Turns, ours: Side, theirs: Side, loop: HandWritten) -> None:
        self._turns = turns
        self._ours = ours
        self._theirs = theirs
        self._loop = loop
        self._steps_in_turn = 0
        self._began_s = 0.0

    def start(self) -> None:
        """Begin the trainer's first turn."""
        self._began_s = cpu_seconds()

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if report.number > self._turns.total_steps:
            return
        self._ours.losses.append(report.loss)
        self._steps_in_turn += 1
        if not self._turns.ends_after(report.number):
            return
        handed_over_s = cpu_seconds()
        self._ours.cpu_s.append(handed_over_s - self._began_s)
        self._theirs.losses += self._loop.take(self._steps_in_turn)
        self._began_s = cpu_seconds()
        self._theirs.cpu_s.append(self._began_s - handed_over_s)
        self._steps_in_turn = 0


def cpu_seconds() -> float:
    """User and system seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def recipe_of(config: Config) -> Recipe:
    """The numbers of the hand-written step. Raises ValueError when it could not do the same."""
    optimizer = config.optimizer
    if (optimizer.name, optimizer.implementation) != ("AdamW", "fused"):
        raise ValueError(
            f"the hand-written loop has fused AdamW, the config {optimizer.implementation} "
            f"{optimizer.name}"
        )
    return Recipe(
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_norm=config.training.max_norm,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of each rank: run the turns and write what was measured to FOLDER/rank_N.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--turn-steps", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    turns = Turns(warmup_steps=given.warmup_steps, steps=given.turn_steps, count=given.turns)
    # One step more than is measured, so that in the last turn too the next step is read ahead.
    trainer_arguments += ["--training.steps", str(turns.total_steps + 1)]

    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    check_against(config, int(os.environ.get("WORLD_SIZE", "1")))
    device = detect_device(config.job.device)
    with (
        start_mesh(config.parallelism, config.comm, device) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        loop = HandWritten(config, built, turns)
        ours, theirs = _side(built.job.state.model), _side(loop.model)
        alternation = Alternation(turns, ours, theirs, loop)
        job = replace(built.job, hooks=[*built.job.hooks, alternation])
        alternation.start()
        train(job)
        _write(given.folder, mesh, ours, theirs)


def _side(model: nn.Module) -> Side:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return Side(dtype="+".join(sorted(dtypes)), threads=torch.get_num_threads())


def _batches(built: Built, num_steps: int) -> list[Batch]:
    """This rank's samples of every step, read before the clock starts."""
    job, degrees = built.job, built.job.mesh.degrees
    batches = []
    for step in range(num_steps):
        share = share_of_step(
            step * job.global_batch_size,
            job.global_batch_size,
            job.local_batch_size,
            job.mesh.batch_rank,
            degrees.batch,
        )
        (microbatch,) = job.state.loader.take(share, step + 1)
        fields = {key: getattr(microbatch, key) for key in Batch.__dataclass_fields__}
        batches.append(Batch(**fields))
    return batches


def _write(folder: Path, mesh: Mesh, ours: Side, theirs: Side) -> None:
    path = folder / f"rank_{mesh.rank}.json"
    path.write_text(json.dumps({"ours": asdict(ours), "floor": asdict(theirs)}), encoding="utf-8")


if __name__ == "__main__":
    main()
