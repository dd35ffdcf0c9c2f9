"""The pipeline schedule: the order in which this rank runs microbatches through its stages."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import (
    Microbatch,
    MicrobatchLoss,
    ModelSpec,
    PipelineSchedule,
    TokenLoss,
)
from torchtitan_lite.parallel.context import SequenceSharding, sequence_sharding
from torchtitan_lite.parallel.fsdp import reshard
from torchtitan_lite.parallel.pipeline_stages import plan_stages


def build_pipeline_schedule(
    parts: Sequence[nn.Module],
    spec: ModelSpec,
    loss: TokenLoss,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    hidden_dtype: torch.dtype,
    *,
    is_compiled: bool = False,
    training_loss: MicrobatchLoss | None = None,
) -> PipelineSchedule:
    """Return the schedule for the parts of the model on this rank. `hidden_dtype` is that of the
    hidden states that pass from stage to stage, `is_compiled` says whether the blocks are.
    `training_loss` takes the place of `loss` in runs with backward; pipelines do not support it."""
    sharding = sequence_sharding(mesh, parallelism)
    if mesh.degrees.pp == 1:
        depth = len(spec.prediction_units)
        return GradientAccumulation(parts[0], loss, mesh, sharding, depth, training_loss)
    # torch's pipelines import the compiler, which takes half a second.
    from torchtitan_lite.parallel.pipeline import Pipeline

    return Pipeline(
        parts,
        plan_stages(spec, parallelism),
        loss,
        mesh,
        sharding,
        parallelism,
        spec=spec,
        dtype=hidden_dtype,
        is_compiled=is_compiled,
    )


class GradientAccumulation:
    """Without pipeline parallelism: microbatches run in turn, and gradients accumulate.

    The gradients of each microbatch are reduced over shards immediately, because unsharded
    gradients would need the memory that sharding saves, and over replicas once, after the last
    microbatch.
    """

    min_microbatches = 1

    def __init__(
        self,
        model: nn.Module,
        loss: TokenLoss,
        mesh: Mesh,
        sharding: SequenceSharding,
        prediction_depth: int = 0,
        training_loss: MicrobatchLoss | None = None,
    ) -> None:
        """`prediction_depth` is that of multi-token prediction. `training_loss` takes the place of
        `loss` in runs with backward."""
        self._sharding, self._prediction_depth = sharding, prediction_depth
        self._model = model
        self._loss, self._training_loss = loss, training_loss
        self._device = mesh.device.torch_device
        # The ranks that share the matrices all compute the same loss.
        self._copies = mesh.degrees.tp

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See `spec.PipelineSchedule`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, microbatch in enumerate(microbatches, start=1):
            batch = microbatch.to(self._device).with_future(self._prediction_depth)
            batch = self._sharding.shard(batch)
            if backward and isinstance(self._model, FSDPModule):
                is_last = number == len(microbatches)
                self._model.set_is_last_backward(is_last)
                self._model.set_requires_all_reduce(is_last)
            token_loss = self._loss
            if backward and self._training_loss is not None:
                token_loss = self._training_loss(batch)
            with torch.set_grad_enabled(backward):
                loss = self._model(
                    batch.tokens_BS,
                    positions_BS=batch.positions_BS,
                    rng_keys_B=batch.rng_keys_B,
                    documents_BS=batch.documents_BS,
                    targets_BS=batch.targets_BS,
                    loss=token_loss,
                    **batch.future_inputs,
                )
            if backward:
                if before_last is not None and number == len(microbatches):
                    before_last()
                loss.backward()
            total += loss.detach()
        if not backward:
            reshard(self._model)
        return total / self._copies
