"""This project's side of the GPU benchmark: `build` and `train` on the samples of a case."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_case import (
    LR,
    MAX_NORM,
    WARMUP_STEPS,
    Case,
    Recording,
    fill_weights,
    random_samples,
    use_all_cores,
)
from benchmarks.processes import CHECKOUT
from torchtitan_lite.config import Config
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.models import llama3
from torchtitan_lite.nn.rope import RopeScaling
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import config_from
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

_TEXT = CHECKOUT / "tests" / "assets" / "fixture.jsonl"
_COPIES = 40
"""Copies of the text, so that it fills the longest sequence."""


def train_ours(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train a case in this process, with outputs in `folder`. Returns the measurements."""
    gpu_case = Case(**case)
    use_all_cores()
    text = Path(folder) / "text.jsonl"
    text.write_text(_TEXT.read_text(encoding="utf-8") * _COPIES, encoding="utf-8")
    config = config_of(gpu_case, Path(folder), text)
    recording = Recording(gpu_case)

    def record(state: TrainState, report: StepReport) -> None:
        recording.losses[report.number] = report.loss
        recording.end_step()

    with (
        start_mesh(config.parallelism, config.comm, detect_device(gpu_case.device), folder) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        check_against(config, mesh.world_size)
        state = built.job.state
        # The text of the config only opened the data; its tokens are replaced by random ones.
        state.loader.close()
        state.loader = random_samples(gpu_case)
        parameters = {
            name: local_tensor(parameter).detach()
            for name, parameter in state.model.named_parameters()
        }
        fill_weights(parameters)
        train(replace(built.job, hooks=[*built.job.hooks, record]))
        values = recording.values(parameters.values())
        state.loader.close()
        return values


def config_of(case: Case, folder: Path, text: Path) -> Config:
    """Return the config of a case; `text` is for its tokenizer."""
    llama3.FLAVORS["benchmark"] = llama3.Llama3Dims(
        dim=case.dim,
        num_layers=case.num_layers,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        hidden_dim=case.hidden_dim,
        vocab_size=case.vocab_size,
        rope_scaling=RopeScaling(factor=8.0),
    )
    mode = {"none": "none", "op": "selective"}[case.recompute]
    return config_from(
        {
            "job": {"dump_folder": str(folder), "device": case.device},
            "model": {"flavor": "benchmark"},
            "training": {
                "dataset_path": str(text),
                "cache_folder": str(folder.parent / "cache"),
                "local_batch_size": case.batch,
                "global_batch_size": case.batch,
                "seq_len": case.seq_len,
                "steps": case.trained_steps,
                "max_norm": MAX_NORM,
            },
            "optimizer": {"lr": LR, "weight_decay": 0.0},
            "lr_scheduler": {"warmup_steps": WARMUP_STEPS, "min_lr_factor": 1.0},
            "activation_checkpoint": {"mode": mode, "selective_ac_option": "op"},
            "compile": {"enable": case.compiled},
            "checkpoint": {
                "enable": case.save_every > 0,
                "interval": max(1, case.save_every),
                "enable_first_step_checkpoint": False,
                "keep_latest_k": 2,
                # Both sides only save: no snapshots between saves.
                "ram_interval": 0,
                "last_save_model_only": True,
            },
            "metrics": {"log_freq": case.log_freq, "enable_tensorboard": False},
        },
        "the benchmark",
    )
