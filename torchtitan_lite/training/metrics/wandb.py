"""Weights & Biases, as an alternative to TensorBoard.

The run is opened at the start, so that a missing login is reported before the first step. Project,
entity, group and mode come from wandb's own environment variables.
"""

import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torchtitan_lite.core.optional_dependencies import require
from torchtitan_lite.training.metrics.record import Event, StepRecord, scalars


class WeightsAndBiases:
    """Sends scalars `train/FIELD` and `EVENT/VALUE` to one run, which a resume continues. Local
    files are in `folder/wandb`.

    `run_config` is the resolved config, shown with the curves. `label` distinguishes ranks. Raises
    UserError if the package is missing.
    """

    def __init__(
        self, folder: Path, *, resume_step: int, run_config: Mapping[str, Any], label: str
    ) -> None:
        require("wandb", "metrics.enable_wandb = true")
        wandb: Any = import_module("wandb")
        # wandb creates this folder itself, but only after it has received the id.
        id_path = folder / "wandb" / "run_id"
        id_path.parent.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan_lite"),
            id=os.environ.get("WANDB_RUN_ID") or _run_id(id_path, resume_step),
            resume="allow",
            name=label or None,
            dir=str(folder),
            config=dict(run_config),
        )
        # A separate axis: wandb's counter only increases, but a resume may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        self._send("train", record.step, record.values())

    def event(self, event: Event) -> None:
        self._send(event.name, event.step, event.values)

    def close(self) -> None:
        self._run.finish()

    def _send(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        named = {f"{group}/{name}": value for name, value in scalars(values).items()}
        self._run.log({"step": step, **named})


def _run_id(path: Path, resume_step: int) -> str:
    """Return the id in `path` if the run resumes, otherwise a new one."""
    if resume_step == 0 or not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
