"""Trace of one rank's training step on tensors without memory: the model, the schedule, the
reduction of the step and the optimizer are those of a run; the other ranks are not there, and
collectives move nothing."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.config import Config
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import Accelerator, Device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.distributed.torch_compat import (
    fake_process_group,
    fake_tensors,
    local_tensor,
)
from torchtitan_lite.fault_tolerance.replica import SingleReplica
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import Microbatch, ModelSpec, TokenLoss
from torchtitan_lite.optim import ShardedOptimizer, build_optimizer
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.pipeline_stages import join_stages
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.tools.estimate.recorder import StepRecorder, StepTrace
from torchtitan_lite.training.builders.model import materialize, parallelized_parts
from torchtitan_lite.training.step.totals import StepValues, reduce_step

CPU_DEVICE = Device(
    torch_device=torch.device("cpu"),
    backend="gloo",
    pin_memory=False,
    fused_optimizer=True,
    peak_flops=None,
)
"""The device of tensors without memory, for any device that is estimated."""


def trace_step(
    config: Config,
    spec: ModelSpec,
    *,
    rank: int,
    world_size: int,
    num_microbatches: int,
    kept: Callable[[Sequence[str]], Sequence[str]],
    accelerator: Accelerator,
    logits_per_chunk: int = CPU_DEVICE.logits_per_chunk,
) -> StepTrace:
    """Trace a step of `num_microbatches` on `rank`. `kept` chooses from the units of a stage those
    that are traced; `logits_per_chunk` as in `cross_entropy`."""
    with warnings.catch_warnings(), _without_garbage_collection():
        # The backend of the fake group knows no timeouts, and torch announces newer names.
        warnings.simplefilter("ignore")
        with (
            fake_process_group(rank, world_size),
            start_mesh(config.parallelism, config.comm, CPU_DEVICE) as mesh,
        ):
            weight = config.training.z_loss_weight
            loss = cross_entropy(logits_per_chunk=logits_per_chunk, z_loss_weight=weight)
            return _trace(config, spec, mesh, num_microbatches, kept, accelerator, loss)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage, as between the scheduled collections of a run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _trace(
    config: Config,
    spec: ModelSpec,
    mesh: Mesh,
    num_microbatches: int,
    kept: Callable[[Sequence[str]], Sequence[str]],
    accelerator: Accelerator,
    token_loss: TokenLoss,
) -> StepTrace:
    is_compiled = config.compile.covers("model")
    # Dispatch modes do not see into compiled blocks.
    eager = config.compile.model_copy(update={"enable": False})
    config = config.model_copy(update={"compile": eager})
    parts = parallelized_parts(config, spec, mesh, kept=kept)
    recorder = StepRecorder(parts, spec, mesh, accelerator, is_compiled=is_compiled)
    schedule = build_pipeline_schedule(
        parts,
        spec,
        recorder.loss(token_loss),
        mesh,
        config.parallelism,
        hidden_dtype=precision_policy(config.training, mesh.device).compute,
        is_compiled=False,
    )
    with fake_tensors():
        for part in parts:
            materialize(part, config, mesh)
        model = join_stages(parts, spec, mesh)
        weights = list(model.parameters())
        parameters = [weight for weight in weights if weight.requires_grad]
        optimizer = build_optimizer(
            config.optimizer,
            model,
            spec.no_decay,
            mesh.device,
            no_muon=spec.muon_exclusions,
            orthogonalization=recorder.orthogonalization,
        )
        _allocate(optimizer, parameters)
        size = config.parallelism.pipeline_parallel_microbatch_size
        size = config.training.local_batch_size if mesh.degrees.pp == 1 else size
        batches = [
            _microbatch(size, config.training.seq_len, spec.document_mask)
            for _ in range(num_microbatches)
        ]
        slots = {p: list(optimizer.slots(p).values()) for p in parameters}
        recorder.start(weights, [value for values in slots.values() for value in values])
        with recorder:
            loss = torch.zeros((), dtype=torch.float64)
            loss += schedule.run(batches, backward=True)
            recorder.end_of_schedule(parameters)
            values = StepValues(
                loss=loss,
                num_targets=1,
                cursor=0,
                step=0,
                save_signals=torch.zeros(NUM_SAVE_SIGNALS, dtype=torch.float64),
                work_times=torch.zeros(0, dtype=torch.float64),
                rank_flags=torch.zeros(0, dtype=torch.float64),
                router_counts=torch.zeros(0, dtype=torch.float64),
            )
            reduce_step(values, parameters, SingleReplica(), mesh, StopRequest())
            recorder.stage = "optimizer"
            optimizer.step(1e-4, 0.5)
        return recorder.result(
            num_microbatches,
            num_parameters=sum(local_tensor(weight).numel() for weight in weights),
            num_slot_elements=sum(
                local_tensor(value).numel()
                for parameter, values in slots.items()
                for value in values
                if value.shape == parameter.shape
            ),
        )


def _allocate(optimizer: ShardedOptimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Create the optimizer's state, as its first step does."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0)
    optimizer.zero_grad()


def _microbatch(size: int, length: int, has_documents: bool) -> Microbatch:
    def integers(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, length, dtype=dtype)

    return Microbatch(
        tokens_BS=integers(),
        targets_BS=integers(),
        positions_BS=integers(),
        documents_BS=integers(torch.int32) if has_documents else None,
        rng_keys_B=torch.zeros(size, dtype=torch.int64),
        samples=tuple(range(size)),
    )
