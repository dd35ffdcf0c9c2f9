"""Recorder of a traced step: live memory and work, by the parts of the model."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.distributed.device import Accelerator
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import TensorSpec
from torchtitan_lite.distributed.torch_compat import (
    Operations,
    RecordedLabels,
    flops_of,
    group_of,
    local_tensor,
    outside_of_fake_tensors,
    tensors_in,
)
from torchtitan_lite.nn.spec import ModelSpec, TokenLoss, named_blocks
from torchtitan_lite.optim.muon import Orthogonalization, specs_of
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.orthogonalization import BUCKET_BYTES, assign_matrices
from torchtitan_lite.tools.estimate.memory import KINDS, ByKind, Kind, StorageLog
from torchtitan_lite.tools.estimate.routing import BalancedRouting
from torchtitan_lite.tools.estimate.work import (
    FUSED_TRAFFIC,
    MATMUL_EFFICIENCY,
    TRAFFIC_EFFICIENCY,
    Traffic,
    Work,
    collective_seconds,
)
from torchtitan_lite.training.debug.communication import AxisNames, name_of, size_of
from torchtitan_lite.training.debug.modules import ROOT, ModuleTracker

Place = tuple[str, str, int]
"""A unit of the model, the phase, and how often both occurred before."""


@dataclass(frozen=True, kw_only=True)
class UnitSpan:
    """A part of the step in which one unit of the model runs."""

    place: Place
    peak: ByKind
    """Live bytes by kind at the time of its greatest sum."""
    end: ByKind
    """Live bytes by kind at its end."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The traced step of one rank."""

    unit_spans: tuple[UnitSpan, ...]
    schedule: Work
    """Forward and backward of the traced microbatches."""
    microbatch: Work
    """One microbatch more."""
    update: Work
    """Reduction of the step's numbers, and the optimizer."""
    num_microbatches: int
    num_parameters: int
    """Elements of parameters that this rank holds."""
    num_slot_elements: int
    """Elements of optimizer state that are sharded as the parameters."""


class StepRecorder:
    """Runs every operation of a step, and records memory and work. A context manager."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        spec: ModelSpec,
        mesh: Mesh,
        accelerator: Accelerator,
        *,
        is_compiled: bool,
    ) -> None:
        self.stage = "schedule"
        self._parts = parts
        self._tracker = ModuleTracker(parts)
        self._units = _units(parts, spec)
        self._is_pipeline = mesh.degrees.pp > 1
        self._axes = AxisNames(mesh)
        self._accelerator = accelerator
        self._other_factor = FUSED_TRAFFIC if is_compiled else 1.0
        self._log = StorageLog()
        self._routing = BalancedRouting()
        self._mode = Operations(self._run)
        self._labels = RecordedLabels()
        self._in_loss = False
        self._compute = [0.0, 0.0, 0.0]
        """FLOPs, seconds of matrix products, seconds of other operations."""
        self._traffic: dict[tuple[str, str, bool], Traffic] = {}
        self._at_losses: list[Work] = []
        """Work up to the loss of each microbatch."""
        self._schedule = Work()
        self._starts: list[tuple[str, str, int]] = []
        """Unit, phase and first time of each span."""

    def loss(self, inner: TokenLoss) -> TokenLoss:
        """Return `inner`, whose tensors count as logits, and whose calls count microbatches."""

        def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._at_losses.append(self._work())
            self._in_loss = True
            try:
                return inner(*args, **kwargs)
            finally:
                self._in_loss = False

        return loss

    def orthogonalization(
        self, parameters: Sequence[nn.Parameter], iteration: NewtonSchulz, device: torch.device
    ) -> Orthogonalization:
        """Return what stands for the iterations of Muon: the mean over the ranks, because the work
        of a single rank is not a multiple of the number of blocks."""
        # The ranks of a mesh are a tensor with values.
        with outside_of_fake_tensors():
            return _MeanOrthogonalization(self, specs_of(parameters), iteration)

    def add_orthogonalization(self, flops: float, num_bytes: float, ranks: Sequence[int]) -> None:
        """Add `flops` of iterations on this rank, and `num_bytes` that it sends to and from the
        owners beside them."""
        if self.stage != "optimizer":
            return
        # The matrices that are at work, and those that move.
        slots = [
            torch.empty(min(BUCKET_BYTES, int(num_bytes / 2)), dtype=torch.uint8) for _ in range(2)
        ]
        self._compute[0] += flops
        self._compute[1] += flops / (MATMUL_EFFICIENCY * self._accelerator.peak_flops)
        node = dist.get_rank() // self._accelerator.per_node
        near = sum(rank // self._accelerator.per_node == node for rank in ranks)
        seconds = collective_seconds("all_to_all", num_bytes, len(ranks), near, self._accelerator)
        key = ("owners", "all_to_all", True)
        traffic = Traffic(count=2, num_bytes=num_bytes, seconds=seconds)
        self._traffic[key] = self._traffic.get(key, Traffic()) + traffic
        del slots

    def start(self, parameters: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
        """Note what is live before the step."""
        buffers = [buffer for part in self._parts for buffer in part.buffers()]
        # A weight that another stage owns is not among the parameters.
        weights = [*parameters, *(p for part in self._parts for p in part.parameters())]
        self._log.note([local_tensor(tensor) for tensor in weights], "weights")
        self._log.note([local_tensor(tensor) for tensor in state], "optimizer")
        self._log.note(buffers, "buffers")
        self._starts.append((ROOT, "start", self._log.time))

    def __enter__(self) -> "StepRecorder":
        self._tracker.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        self._tracker.__exit__(*raised)
        self._routing.clear()

    def end_of_schedule(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the gradients, and separate the work of the schedule from that of the update."""
        gradients = (parameter.grad for parameter in parameters)
        self._log.set_kind((grad for grad in gradients if grad is not None), "gradients")
        self._schedule = self._work()
        self.stage = "reduction"

    def result(
        self, num_microbatches: int, *, num_parameters: int, num_slot_elements: int
    ) -> StepTrace:
        """Return the trace."""
        if self._is_pipeline:
            # FSDP gathers and reduces once; all else is alike for all microbatches.
            microbatch = self._schedule.split()[0] * (1 / num_microbatches)
        elif num_microbatches > 1:
            # From one loss to the next: a backward, and the forward of the next microbatch.
            microbatch = self._at_losses[1] - self._at_losses[0]
        else:
            microbatch = self._schedule
        return StepTrace(
            unit_spans=tuple(self._unit_spans()),
            schedule=self._schedule,
            microbatch=microbatch,
            update=self._work() - self._schedule,
            num_microbatches=num_microbatches,
            num_parameters=num_parameters,
            num_slot_elements=num_slot_elements,
        )

    def _work(self) -> Work:
        flops, matmul_s, other_s = self._compute
        return Work(flops=flops, matmul_s=matmul_s, other_s=other_s, traffic=dict(self._traffic))

    def _run(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._enter_span()
        group = group_of(operation, args, kwargs)
        if group is None and self._label.startswith(_REDUCTION):
            # What FSDP copies into the buffer of the reduction, and what it takes from it.
            self._log.set_kind(tensors_in(list(args)), "gradients")
        result = self._routing.run(operation, args, kwargs, group)
        self._log.note(result, self._kind())
        if self._labels.follow(operation, args):
            # FSDP frees and refills its parameters under labels.
            self._log.measure_again()
        if group is None:
            self._compute_of(operation, args, kwargs, result)
        else:
            self._communicate(operation, group, args, kwargs, result)
        return result

    @property
    def _label(self) -> str:
        return self._labels[-1] if self._labels else ""

    @property
    def _is_of_fsdp(self) -> bool:
        return any(label.startswith("FSDP::") for label in self._labels)

    def _kind(self) -> Kind:
        if self.stage == "optimizer":
            return "optimizer"
        if self._label.startswith(_ACCUMULATION):
            return "gradients"
        if self._is_of_fsdp or self.stage == "reduction":
            return "buffers"
        return "logits" if self._in_loss else "activations"

    def _enter_span(self) -> None:
        """Begin a span if another unit or phase runs. What runs between units belongs to the
        one before."""
        before_unit, before_phase, _ = self._starts[-1]
        if self.stage == "schedule":
            unit = self._units.get(self._tracker.module or ROOT)
            phase = self._tracker.phase or before_phase
            unit = before_unit if unit is None else unit
        else:
            unit, phase = ROOT, self.stage
        if (unit, phase) != (before_unit, before_phase):
            self._starts.append((unit, phase, self._log.time + 1))

    def _compute_of(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if getattr(operation, "is_view", False) or operation.namespace == "profiler":
            return
        flops = flops_of(operation, args, kwargs, result)
        tensors = tensors_in((args, kwargs, result))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        traffic_s = num_bytes / (TRAFFIC_EFFICIENCY * self._accelerator.memory_bytes_per_s)
        self._compute[0] += flops
        if flops:
            matmul_s = flops / (MATMUL_EFFICIENCY * self._accelerator.peak_flops)
            self._compute[1] += max(matmul_s, traffic_s)
        else:
            is_in_block = self.stage == "schedule" and not self._is_of_fsdp
            self._compute[2] += traffic_s * (self._other_factor if is_in_block else 1.0)

    def _communicate(
        self,
        operation: Any,
        group: dist.ProcessGroup,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        name = name_of(operation)
        num_bytes, _ = size_of((*args, *kwargs.values()), result)
        # Stages of a pipeline are on different nodes where they can be, and wait in the bubble.
        size, near = _ranks(group, self._accelerator.per_node)
        is_step = self.stage != "schedule"
        key = (self._axes.of(group, operation, "step" if is_step else ""), name, self._is_of_fsdp)
        traffic = Traffic(
            count=1,
            num_bytes=num_bytes,
            seconds=collective_seconds(name, num_bytes, size, near, self._accelerator),
        )
        self._traffic[key] = self._traffic.get(key, Traffic()) + traffic

    def _unit_spans(self) -> Iterator[UnitSpan]:
        sums = self._log.sums()
        counts: Counter[tuple[str, str]] = Counter()
        starts = [*(start for _, _, start in self._starts[1:]), self._log.time + 1]
        for (unit, phase, start), stop in zip(self._starts, starts, strict=True):
            if stop <= start:
                continue
            part = sums[start:stop]
            peak, end = part[part.sum(axis=1).argmax()], part[-1]
            yield UnitSpan(
                place=(unit, phase, counts[unit, phase]),
                peak=dict(zip(KINDS, map(int, peak), strict=True)),
                end=dict(zip(KINDS, map(int, end), strict=True)),
            )
            counts[unit, phase] += 1


class _MeanOrthogonalization:
    """Stands for `optim.ShardedOrthogonalization`: counts the mean over its ranks, because the
    owners of the matrices of few blocks are few."""

    def __init__(
        self, recorder: StepRecorder, specs: Sequence[TensorSpec], iteration: NewtonSchulz
    ) -> None:
        self._recorder, self._assignment = recorder, assign_matrices(specs, iteration)

    def run(self, shards: Sequence[torch.Tensor]) -> None:
        """See `Orthogonalization`."""
        assignment = self._assignment
        count = len(assignment.ranks)
        flops = sum(assignment.flops.values()) / count
        self._recorder.add_orthogonalization(
            flops, assignment.moved_bytes / count, assignment.ranks
        )


def _units(parts: Sequence[nn.Module], spec: ModelSpec) -> dict[str, str]:
    """Return the unit of each module: a block by its distance from the nearer end of its stage,
    others by name. Modules of no unit are not among them."""
    depth = spec.blocks.count(".") + 1
    units: dict[str, str] = {}
    for stage, part in enumerate(parts):
        names = [name for _, name, _ in named_blocks(part, spec)]
        for name, _ in part.named_modules():
            block = ".".join(name.split(".")[:depth])
            if block in names:
                position, num_behind = names.index(block), len(names) - 1 - names.index(block)
                units[name] = (
                    label_from_start(stage, position)
                    if position <= num_behind
                    else label_from_end(stage, num_behind)
                )
            elif name:
                units[name] = name.partition(".")[0]
    return units


def label_from_start(stage: int, position: int) -> str:
    """Return the label of the block at `position`, which it keeps when later ones are removed."""
    return f"block +{position} of part {stage}"


def label_from_end(stage: int, num_behind: int) -> str:
    """Return the label of the block with `num_behind` blocks behind it in its stage, which it keeps
    when earlier ones are removed."""
    return f"block -{num_behind} of part {stage}"


def _ranks(group: dist.ProcessGroup, per_node: int) -> tuple[int, int]:
    """Return the ranks of a group, and how many of them are on this rank's node."""
    node = dist.get_rank() // per_node
    return group.size(), _near(group, node, per_node)


@cache
def _near(group: dist.ProcessGroup, node: int, per_node: int) -> int:
    return sum(rank // per_node == node for rank in dist.get_process_group_ranks(group))


_REDUCTION, _ACCUMULATION = "FSDP::post_backward_reduce", "FSDP::post_backward_accumulate"
"""Labels of FSDP2, which are followed by the module's name."""
