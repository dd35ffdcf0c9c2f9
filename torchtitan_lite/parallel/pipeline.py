"""Pipeline parallelism: the ranks of the `pp` axis share the layers, and microbatches pass through
them in the order of one of torch's schedules, or of a file. Without backward every schedule runs
alike: a rank runs all microbatches through its first stage, then through its next.

Masks, positions and targets reach every stage with the microbatch, so only hidden states travel
between stages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import align_gradient
from torchtitan_lite.distributed.torch_compat import (
    can_split_backward,
    forward_schedule,
    local_tensor,
    schedule_from_order,
    without_messages_to_itself,
)
from torchtitan_lite.nn.spec import Microbatch, ModelSpec, TokenLoss
from torchtitan_lite.parallel.context import SequenceSharding
from torchtitan_lite.parallel.fsdp import reshard
from torchtitan_lite.parallel.pipeline_order import forward_only
from torchtitan_lite.parallel.pipeline_stages import (
    StagePlan,
    shared_weights,
    unsupported_microbatches,
)


class Pipeline:
    """Runs a step through the stages that this rank holds; see `spec.PipelineSchedule`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: StagePlan,
        loss: TokenLoss,
        mesh: Mesh,
        sharding: SequenceSharding,
        parallelism: ParallelismConfig,
        *,
        spec: ModelSpec,
        dtype: torch.dtype,
        is_compiled: bool,
    ) -> None:
        """`parts` are this rank's stages in rising order; hidden states are of `dtype`."""
        # The backward of a compiled block is one node of autograd, which would run twice.
        self._splits_backward = can_split_backward() and not is_compiled
        self._group = mesh.device_mesh.get_group("pp")
        rank = mesh.device_mesh.get_local_rank("pp")
        self._stages = dict(zip(plan.of_rank(rank), parts, strict=True))
        self._plan = plan
        self._last = len(plan.modules) - 1
        self.min_microbatches = len(plan.modules)
        self._device = mesh.device.torch_device
        self._sharding = sharding
        self._copies = mesh.degrees.tp
        self._sequence_parts = mesh.degrees.tp if parallelism.enable_sequence_parallel else 1
        self._schedule_class = get_schedule_class(parallelism.pipeline_parallel_schedule)
        self._width, self._dtype = spec.width, dtype
        self._prediction_depth = len(spec.prediction_units)
        self._shared = [
            SharedWeight(self._stages, plan, units, stages, self._group)
            for units, stages in shared_weights(plan, spec)
        ]
        self._made: dict[tuple[int, int, int, bool], Any] = {}
        if self._last in self._stages:
            part = self._stages[self._last]
            part.forward = partial(part.forward, loss=loss)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See `spec.PipelineSchedule`. `before_last` is not called, because stages alternate until
        the end."""
        batches = [
            self._sharding.shard(mb.to(self._device).with_future(self._prediction_depth))
            for mb in microbatches
        ]
        batch_size, length = batches[0].tokens_BS.shape
        schedule = self._schedule(len(batches), batch_size, length, backward)
        inputs = {
            "positions_BS": torch.cat([batch.positions_BS for batch in batches]),
            "rng_keys_B": torch.cat([batch.rng_keys_B for batch in batches]),
            "targets_BS": torch.cat([batch.targets_BS for batch in batches]),
        }
        for name in batches[0].future_inputs:
            inputs[name] = torch.cat([batch.future_inputs[name] for batch in batches])
        documents = [mb.documents_BS for mb in batches if mb.documents_BS is not None]
        if documents:
            inputs["documents_BS"] = torch.cat(documents)
        tokens_BS = torch.cat([batch.tokens_BS for batch in batches])
        for weight in self._shared:
            weight.refresh()
        holds_first, holds_last = 0 in self._stages, self._last in self._stages
        losses: list[torch.Tensor] = []
        with torch.set_grad_enabled(backward):
            (schedule.step if backward else schedule.eval)(
                *((tokens_BS,) if holds_first else ()),
                # The loss is what the last stage gives; the schedule wants a target all the same.
                target=tokens_BS if holds_last else None,
                losses=losses if holds_last else None,
                return_outputs=False,
                **inputs,
            )
        if backward:
            for weight in self._shared:
                weight.return_gradient()
        else:
            for part in self._stages.values():
                reshard(part)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total / self._copies

    def _schedule(self, num: int, batch_size: int, length: int, backward: bool) -> Any:
        """Return torch's schedule for `num` microbatches of this shape."""
        key = (num, batch_size, length, backward)
        if key not in self._made:
            stages = [self._stage(stage, batch_size, length) for stage in self._stages]
            make = self._forward_and_backward if backward else self._forward
            # The trainer divides once, by the number of target tokens.
            self._made[key] = make(
                stages, num, loss_fn=lambda output, target: output, scale_grads=False
            )
        return self._made[key]

    def _forward(self, stages: list[PipelineStage], num: int, **options: Any) -> Any:
        rows = forward_only(self._plan.ranks, num).cells()
        return forward_schedule(stages, rows, self._plan.ranks, num, **options)

    def _forward_and_backward(self, stages: list[PipelineStage], num: int, **options: Any) -> Any:
        if self._plan.order is not None:
            return schedule_from_order(stages, self._plan.order.cells(), num, **options)
        single = issubclass(self._schedule_class, PipelineScheduleSingle)
        try:
            return self._schedule_class(stages[0] if single else stages, num, **options)
        except ValueError as error:
            name = self._schedule_class.__name__
            raise unsupported_microbatches(name, num, len(self._plan.modules), error) from None

    def _stage(self, stage: int, batch_size: int, length: int) -> PipelineStage:
        """Create a stage with given shapes, so that stages do not exchange them as pickled
        messages."""
        tokens = torch.empty(batch_size, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            batch_size,
            length // self._sequence_parts,
            self._width,
            dtype=self._dtype,
            device="meta",
            requires_grad=True,
        )
        scalar = torch.promote_types(self._dtype, torch.float32)
        loss = torch.empty((), dtype=scalar, device="meta", requires_grad=True)
        created = PipelineStage(
            self._stages[stage],
            stage,
            len(self._plan.modules),
            self._device,
            input_args=tokens if stage == 0 else hidden,
            output_args=loss if stage == self._last else hidden,
            group=self._group,
            dw_builder=None if self._splits_backward else _no_backward_of_weights,
        )
        return without_messages_to_itself(created)


def _no_backward_of_weights() -> Callable[..., None]:
    """Build the weights' backward of a stage whose backward of the inputs includes it."""
    return lambda: None


class SharedWeight:
    """A weight that two stages share, such as that of tied embeddings.

    The first of the stages owns it: only there it has optimizer state, a norm and a place in
    checkpoints. The other computes with a copy, which is refreshed before each run and whose
    gradient is sent back after it. Both are sharded alike, so shards are sent as they are.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        plan: StagePlan,
        units: tuple[str, str],
        held: tuple[int, int],
        group: dist.ProcessGroup,
    ) -> None:
        """`stages` are those of this rank, `group` is the pp group. `units` are the modules with
        the weight and its copy, `held` the stages that hold them."""
        self._group = group
        self._owner_rank, self._copy_rank = (plan.ranks[stage] for stage in held)
        self._owner, self._copy = (
            stages[stage].get_submodule(unit).get_parameter("weight") if stage in stages else None
            for stage, unit in zip(held, units, strict=True)
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the owner's values. Every rank of the pipeline must call it."""
        ranks = self._owner_rank, self._copy_rank
        self._move(self._owner, self._copy, ranks, lambda copy, values: copy.copy_(values))

    @torch.no_grad()
    def return_gradient(self) -> None:
        """Add the copy's gradient to the owner's. Every rank of the pipeline must call it."""
        of_copy, of_owner = (
            None if parameter is None else align_gradient(parameter)
            for parameter in (self._copy, self._owner)
        )
        ranks = self._copy_rank, self._owner_rank
        self._move(of_copy, of_owner, ranks, lambda owner, values: owner.add_(values))
        if self._copy is not None:
            self._copy.grad = None

    def _move(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        ranks: tuple[int, int],
        receive: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Pass this rank's shard of `source` to `receive` on the rank of `target`."""
        source_rank, target_rank = (dist.get_global_rank(self._group, rank) for rank in ranks)
        if source is not None and target is not None:
            receive(local_tensor(target), local_tensor(source))
        elif source is not None and local_tensor(source).numel():
            dist.send(local_tensor(source).contiguous(), target_rank, self._group)
        elif target is not None and local_tensor(target).numel():
            values = torch.empty_like(local_tensor(target), memory_format=torch.contiguous_format)
            dist.recv(values, source_rank, self._group)
            receive(local_tensor(target), values)
