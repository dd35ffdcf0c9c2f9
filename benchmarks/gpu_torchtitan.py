"""torchtitan 0.2.2's side of the GPU benchmark: its own trainer on the samples of a case.

Its model, loss, optimizer, compilation, checkpointing and loop are torchtitan's. From here come the
flavor (torchtitan's has no 1B), the samples, the initial weights, and the marks at the ends of
steps.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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
from benchmarks.processes import free_port

FLAVOR = "benchmark"


def train_torchtitan(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train a case in this process, with outputs in `folder`. Returns the measurements."""
    gpu_case = Case(**case)
    use_all_cores()
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    if gpu_case.device == "cpu":
        _run_torchtitan_on_cpu()

    from torchtitan.tools.logging import init_logger

    init_logger()
    _keep_stager_open()
    trainer_class = _trainer_class(gpu_case, recording := Recording(gpu_case))
    _register_samples_and_flavor(gpu_case)
    trainer = trainer_class(_config(gpu_case, Path(folder)))
    try:
        parameters = dict(trainer.model_parts[0].named_parameters())
        heads = {"wq.weight": gpu_case.num_heads, "wk.weight": gpu_case.num_kv_heads}
        # Modules that are compiled or recomputed wrap the parameter's module.
        wrappers = ("._orig_mod", "._checkpoint_wrapped_module")
        plain = {_without(name, wrappers): value.detach() for name, value in parameters.items()}
        fill_weights(plain, heads)
        trainer.train()
        return recording.values(parameters.values())
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


def _keep_stager_open() -> None:
    """Let torchtitan save twice: it has one stager for all saves, with the pinned memory, and torch
    2.11 closes a stager after its first use."""
    from torch.distributed.checkpoint import _state_dict_stager

    _state_dict_stager.StateDictStager.close = lambda self: None


def _without(name: str, wrappers: tuple[str, ...]) -> str:
    for wrapper in wrappers:
        name = name.replace(wrapper, "")
    return name


def _trainer_class(case: Case, recording: Recording) -> Any:
    """Return torchtitan's trainer, which also marks the ends of steps and keeps logged losses. A
    step ends when the next one begins, so that it includes the save."""
    from torchtitan.train import Trainer

    class Measured(Trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            log = self.metrics_processor.log

            def log_and_keep(step: int, average: float, *words: Any, **named: Any) -> None:
                recording.losses[step] = float(average)
                log(step, average, *words, **named)

            self.metrics_processor.log = log_and_keep

        def should_continue_training(self) -> bool:
            if self.step > 0:
                recording.end_step()
            return super().should_continue_training()

    return Measured


def _register_samples_and_flavor(case: Case) -> None:
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.models import llama3
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols import train_spec

    loader = random_samples(case)
    batches = []
    for step in range(case.trained_steps):
        samples = range(step * case.batch, (step + 1) * case.batch)
        (microbatch,) = loader.load([samples], step + 1)
        batches.append((microbatch.tokens_BS, microbatch.targets_BS))
    loader.close()

    class Samples(IterableDataset):
        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for tokens_BS, targets_BS in batches:
                yield {"input": tokens_BS}, targets_BS

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def build_dataloader(dp_world_size: int, dp_rank: int, **_: Any) -> Any:
        return ParallelAwareDataloader(
            Samples(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=None
        )

    llama3.llama3_args[FLAVOR] = TransformerModelArgs(
        dim=case.dim,
        n_layers=case.num_layers,
        n_heads=case.num_heads,
        n_kv_heads=case.num_kv_heads,
        # hidden = ffn_dim_multiplier * floor(8 * dim / 3), rounded up to a multiple.
        ffn_dim_multiplier=case.hidden_dim / (8 * case.dim // 3),
        multiple_of=64,
        vocab_size=case.vocab_size,
        rope_theta=500000,
    )
    spec = llama3.get_train_spec()
    spec.build_dataloader_fn = build_dataloader
    spec.build_tokenizer_fn = None
    spec.build_validator_fn = None
    train_spec.register_train_spec("llama3", spec)


def _config(case: Case, folder: Path) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.model.name, config.model.flavor = "llama3", FLAVOR
    config.training.local_batch_size = config.training.global_batch_size = case.batch
    config.training.seq_len = case.seq_len
    config.training.steps = case.trained_steps
    config.training.max_norm = MAX_NORM
    config.optimizer.lr, config.optimizer.weight_decay = LR, 0.0
    config.lr_scheduler.warmup_steps = WARMUP_STEPS
    config.lr_scheduler.min_lr_factor = 1.0
    config.activation_checkpoint.mode = {"none": "none", "op": "selective"}[case.recompute]
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable = case.compiled
    config.checkpoint.enable = case.save_every > 0
    config.checkpoint.interval = max(1, case.save_every)
    config.checkpoint.enable_first_step_checkpoint = False
    config.checkpoint.async_mode = "async_with_pinned_mem" if case.device == "cuda" else "disabled"
    config.checkpoint.keep_latest_k = 2
    config.checkpoint.last_save_model_only = True
    config.metrics.log_freq = case.log_freq
    return config


def _run_torchtitan_on_cpu() -> None:
    """Let torchtitan, which requires an accelerator, run on a CPU for a rehearsal: it then reads
    the device's name and memory, and its barrier names a device."""
    torch._utils._get_available_device_type = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    stand_in = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**30),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in stand_in.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *words, **named: barrier()
