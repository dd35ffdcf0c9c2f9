"""Tensor parallelism: each matrix is shared by the ranks of the `tp` axis (arXiv:1909.08053), and
between the matrices each rank works on its part of the sequence (arXiv:2205.05198).

What is cut how comes from the model's shard plan; nothing here names a model. Between modules the
residual stream is a plain tensor: this rank's part of the sequence, or all of it when sequence
parallelism is off. Layer: above nn, mesh and spec.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_lite.errors import MeshError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.moe import Experts
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.spec import ModelSpec, ShardRule, TokenLoss
from torchtitan_lite.torch_compat import overlap_collectives


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Cut the parameters of `model`, which is on the meta device, as its shard plan says."""
    if mesh.degrees.tp == 1:
        return
    cuts = _cuts(model, spec)
    stream: Placement = Shard(1) if parallelism.enable_sequence_parallel else Replicate()
    styles = {
        name.rpartition(".")[0]: _style(
            cut,
            stream,
            loss_parallel=not parallelism.disable_loss_parallel,
        )
        for name, cut in cuts.items()
    }
    for parent in _parents_of(cuts, "columns"):
        # One gather for all the matrices that read the same input.
        styles[parent] = _Gathered(stream)
    shared = _shared_parameters(model)
    tp = mesh.device_mesh["tp"]
    if parallelism.enable_async_tensor_parallel:
        overlap_collectives(tp.get_group())
    parallelize_module(model, tp, styles)
    _replicate_rest(model, tp)
    if stream.is_shard():
        for module in model.modules():
            if isinstance(module, KeyedDropout):
                module.register_forward_pre_hook(partial(_own_positions, tp))
    for (module, name), others in shared:
        for other, other_name in others:
            other.register_parameter(other_name, getattr(module, name))


def check_plan(model: nn.Module, spec: ModelSpec) -> None:
    """Raise MeshError for a rule of the shard plan that matches no parameter of the whole `model`,
    and log the parameters that no rule matches. Experts are no matter of the plan."""
    elsewhere = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    names = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) not in elsewhere
    ]
    rules = {name: _rule(name, spec) for name in names}
    unused = [rule.pattern for rule in spec.shard_plan if rule not in rules.values()]
    if unused:
        raise MeshError(
            f"The shard plan of {spec.name} names {', '.join(unused)}, which no parameter matches. "
            f"Its parameters are named like {names[0]}, {names[-1]}."
        )
    whole = [name for name, rule in rules.items() if rule is None]
    if whole:
        logger.info("Held whole by every tp rank, since no rule matches: %s", ", ".join(whole))


def reaches_all(num_rows: int, degree: int) -> bool:
    """Whether each of `degree` ranks gets a row, when each gets as many as the first."""
    return -(-num_rows // degree) * (degree - 1) < num_rows


def _rule(name: str, spec: ModelSpec) -> ShardRule | None:
    """The first rule that matches a parameter."""
    return next((rule for rule in spec.shard_plan if fnmatchcase(name, rule.pattern)), None)


def _cuts(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Parameter -> its cut, where a rule matches."""
    rules = {name: _rule(name, spec) for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: rule.cut for name, rule in rules.items() if rule is not None}


def _style(cut: str, stream: Placement, *, loss_parallel: bool) -> ParallelStyle:
    match cut:
        case "columns":
            return ColwiseParallel()
        case "rows":
            return RowwiseParallel(output_layouts=stream)
        case "embedding":
            return _Embedding(stream)
        case "sequence" if stream.is_shard():
            return SequenceParallel(use_local_output=True)
        case "sequence":
            return _Whole()
        case "heads":
            return SequenceParallel(sequence_dim=2, use_local_output=True)
        case "output":
            return _Output(stream, loss_parallel=loss_parallel)
        case _:
            raise ValueError(f"no way to cut {cut}")


def _parents_of(cuts: Mapping[str, str], cut: str) -> list[str]:
    """The modules that hold a linear with this cut."""
    linears = [name.rpartition(".")[0] for name, given in cuts.items() if given == cut]
    return sorted({linear.rpartition(".")[0] for linear in linears})


def _shared_parameters(
    model: nn.Module,
) -> list[tuple[tuple[nn.Module, str], list[tuple[nn.Module, str]]]]:
    """Parameters that several modules hold, first holder first: cutting them one module at a time
    would make several of one."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((module, name))
    return [(places[0], places[1:]) for places in holders.values() if len(places) > 1]


def _replicate_rest(model: nn.Module, tp: DeviceMesh) -> None:
    """Make every other parameter a DTensor too: operations on all parameters at once refuse a
    mixture of plain tensors and DTensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                module.register_parameter(name, _distributed(parameter, tp, Replicate()))


def _distributed(parameter: torch.Tensor, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter, tp, [placement]))


def _own_positions(tp: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give dropout the positions of the part of the sequence that it sees between the matrices."""
    x_BSD, keys_B, positions_BS = inputs
    return x_BSD, keys_B, positions_BS.chunk(tp.size(), dim=1)[tp.get_local_rank()]


class _Gathered(ParallelStyle):
    """The module's first input is gathered along the sequence; its other inputs are left alone."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = DTensor.from_local(inputs[0], device_mesh, [self._stream], run_check=False)
            return first.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Whole(ParallelStyle):
    """The weights are whole and the module works on the whole sequence, alike on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return first, *inputs[1:]

        _replicate_rest(module, device_mesh)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda part, inputs, output: output.to_local())
        return module


class _Embedding(ParallelStyle):
    """The embedding, cut over the vocabulary: each rank looks up the tokens whose rows it holds."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, Shard(0)))
        module.forward = partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, tp: DeviceMesh, tokens_BS: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, DTensor)
        rows_VD = weight.to_local()
        indices_BS = tokens_BS - _RowsOfRank(tp, weight.shape[0]).first
        is_elsewhere_BS = (indices_BS < 0) | (indices_BS >= rows_VD.shape[0])
        found_BSD = nn.functional.embedding(indices_BS.masked_fill(is_elsewhere_BS, 0), rows_VD)
        found_BSD = found_BSD.masked_fill(is_elsewhere_BS[..., None], 0)
        parts = DTensor.from_local(found_BSD, tp, [Partial()], run_check=False)
        return parts.redistribute(placements=[self._stream]).to_local()


class _Output(ParallelStyle):
    """The output projection, cut over the vocabulary, with the loss computed on the cut.

    With `loss_parallel` off every rank projects onto the whole vocabulary.
    """

    def __init__(self, stream: Placement, *, loss_parallel: bool) -> None:
        super().__init__()
        self._stream = stream
        self._cut: Placement = Shard(0) if loss_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, self._cut))
        module.forward = partial(self._forward, module, device_mesh)
        return module

    def _forward(
        self,
        module: nn.Module,
        tp: DeviceMesh,
        hidden_BSD: torch.Tensor,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
    ) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, DTensor)
        hidden = DTensor.from_local(hidden_BSD, tp, [self._stream], run_check=False)
        hidden = hidden.redistribute(placements=[Replicate()])
        is_cut = self._cut.is_shard()
        if loss is None or targets_BS is None:
            logits = nn.functional.linear(hidden, weight)
            assert isinstance(logits, DTensor)
            return logits.redistribute(placements=[Replicate()]).to_local()
        # Each rank's gradient of the hidden states is its rows' part of the sum; it is summed and
        # cut along the sequence in one reduce-scatter. Of whole weights it is the whole already.
        gradient: Placement = Partial() if is_cut else Replicate()
        local = hidden.to_local(grad_placements=[gradient])
        return loss(
            local.flatten(0, 1),
            weight.to_local(),
            targets_BS.flatten(),
            shard=_RowsOfRank(tp, weight.shape[0]) if is_cut else None,
        )


class _RowsOfRank:
    """This rank's rows of the vocabulary; see `spec.VocabularyShard`."""

    def __init__(self, tp: DeviceMesh, vocab_size: int) -> None:
        rows = -(-vocab_size // tp.size())
        self.first = min(tp.get_local_rank() * rows, vocab_size)
        self._group = tp.get_group()

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self._group)
        return values
