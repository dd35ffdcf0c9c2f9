"""Tensor parallelism: matrices are sharded over the `tp` axis (arXiv:1909.08053), and between them
each rank works on a shard of the sequence (sequence parallelism, arXiv:2205.05198).

The model's shard plan gives the style of each parameter; nothing here names a model. Between
modules the residual stream is a plain tensor: this rank's shard of the sequence, or all of it
without sequence parallelism.
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

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import ConfigError, MeshError
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import overlap_collectives
from torchtitan_lite.nn.attention import AcrossHeads
from torchtitan_lite.nn.decoder import OutputProjection
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.lora import LORA_A, LORA_B, AdaptedLinear
from torchtitan_lite.nn.moe import Experts
from torchtitan_lite.nn.norm import AllHeadsNorm
from torchtitan_lite.nn.spec import ModelSpec, ShardRule, TokenLoss
from torchtitan_lite.parallel.autograd_collectives import all_reduce


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Shard the parameters of `model`, which is on the meta device, by its shard plan."""
    if mesh.degrees.tp == 1:
        return
    rules = _styles(model, spec)
    stream: Placement = Shard(1) if parallelism.enable_sequence_parallel else Replicate()
    styles = {
        name.rpartition(".")[0]: _parallel_style(
            style,
            stream,
            module=model.get_submodule(name.rpartition(".")[0]),
            loss_parallel=not parallelism.disable_loss_parallel,
        )
        for name, style in rules.items()
    }
    for parent in _parents_of(rules, "columns"):
        # One gather for all the matrices that read the same input.
        styles[parent] = _Gathered(stream)
    shared = _shared_parameters(model)
    tp = mesh.device_mesh["tp"]
    if parallelism.enable_async_tensor_parallel:
        overlap_collectives(tp.get_group())
    adapters = _detach_adapters(model)
    parallelize_module(model, tp, styles)
    for name, adapter in adapters.items():
        _shard_adapter(model.get_submodule(name), adapter, rules.get(f"{name}.weight", ""), tp)
    _replicate_rest(model, tp)
    for module in model.modules():
        if isinstance(module, KeyedDropout) and stream.is_shard():
            module.register_forward_pre_hook(partial(_own_positions, tp))
        elif isinstance(module, AcrossHeads):
            module.register_forward_hook(partial(_gathered_for_heads, tp, stream))
    for (module, name), aliases in shared:
        for owner, alias in aliases:
            owner.register_parameter(alias, getattr(module, name))


def check_plan(model: nn.Module, spec: ModelSpec) -> None:
    """Raise MeshError if a rule of the shard plan matches no parameter of the entire `model`, and
    log the parameters that no rule matches. Expert parallelism shards the experts, and adapters
    follow their layers."""
    elsewhere = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    elsewhere |= {
        id(p) for m in model.modules() if isinstance(m, AdaptedLinear) for p in (m.lora_a, m.lora_b)
    }
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
        logger.info(
            "Replicated over tp, because no rule of the shard plan matches: %s", ", ".join(whole)
        )


def every_rank_has_rows(num_rows: int, degree: int) -> bool:
    """Whether each of `degree` ranks gets a row if `num_rows` are chunked as by torch.chunk."""
    return -(-num_rows // degree) * (degree - 1) < num_rows


def _rule(name: str, spec: ModelSpec) -> ShardRule | None:
    """Return the first rule that matches a parameter."""
    return next((rule for rule in spec.shard_plan if fnmatchcase(name, rule.pattern)), None)


def _styles(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Map parameters to their styles, where a rule matches."""
    rules = {name: _rule(name, spec) for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: rule.style for name, rule in rules.items() if rule is not None}


def _parallel_style(
    style: str, stream: Placement, *, module: nn.Module, loss_parallel: bool
) -> ParallelStyle:
    is_linear = isinstance(module, nn.Linear)
    match style:
        case "columns":
            return ColwiseParallel()
        case "local_columns":
            return _LocalColumns()
        case "head_weights":
            return _HeadWeights()
        case "rows" if is_linear and module.bias is not None:
            return _RowsWithBias(stream)
        case "rows":
            return RowwiseParallel(output_layouts=stream)
        case "embedding":
            return _Embedding(stream)
        case "sequence" if stream.is_shard() and is_linear:
            return _LinearOnShard()
        case "sequence" if stream.is_shard():
            return SequenceParallel(use_local_output=True)
        case "sequence":
            return _Whole()
        case "heads":
            return SequenceParallel(sequence_dim=2, use_local_output=True)
        case "all_heads":
            return _AllHeads()
        case "output":
            return _Output(stream, loss_parallel=loss_parallel)
        case _:
            raise ValueError(f"unknown style {style}")


def _parents_of(styles: Mapping[str, str], style: str) -> list[str]:
    """Return the modules that hold a linear of this style."""
    linears = [
        name.rpartition(".")[0] for name, module_style in styles.items() if module_style == style
    ]
    return sorted({linear.rpartition(".")[0] for linear in linears})


def _shared_parameters(
    model: nn.Module,
) -> list[tuple[tuple[nn.Module, str], list[tuple[nn.Module, str]]]]:
    """Return the parameters that several modules share, as (first, others): sharding one module at
    a time would untie them."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((module, name))
    return [(places[0], places[1:]) for places in holders.values() if len(places) > 1]


def _replicate_rest(model: nn.Module, tp: DeviceMesh) -> None:
    """Make every other parameter a DTensor too: foreach operations do not take plain tensors and
    DTensors together."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                module.register_parameter(name, _distributed(parameter, tp, Replicate()))


def _distributed(parameter: torch.Tensor, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    sharded = distribute_tensor(parameter, tp, [placement])
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _detach_adapters(model: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Remove the adapters from their layers, whose styles would shard them as the weight. Returns A
    and B by the name of the layer."""
    detached = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            detached[name] = (module.lora_a, module.lora_b)
            module.register_parameter(LORA_A, None)
            module.register_parameter(LORA_B, None)
    return detached


def _shard_adapter(
    module: nn.Module, adapter: tuple[nn.Parameter, nn.Parameter], style: str, tp: DeviceMesh
) -> None:
    """Put an adapter back into its layer: sharded along the dim along which the layer's weight is,
    output or input features, and replicated otherwise."""
    a_placement: Placement = Shard(1) if style == "rows" else Replicate()
    b_placement: Placement = Shard(0) if style in ("columns", "local_columns") else Replicate()
    module.register_parameter(LORA_A, _distributed(adapter[0], tp, a_placement))
    module.register_parameter(LORA_B, _distributed(adapter[1], tp, b_placement))
    assert isinstance(module, AdaptedLinear)
    if style == "columns":
        module.forward = partial(_adapted_columns, module, tp)
    elif style == "rows" and module.bias is None:
        module.forward = partial(_adapted_rows, module, tp)


def _local_update(module: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the update, from its part of the input. A replicated matrix gets a
    partial sum as its gradient."""
    return module.update(
        x, _with_partial_gradient(module.lora_a), _with_partial_gradient(module.lora_b)
    )


def _with_partial_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    (placement,) = parameter.placements
    return parameter.to_local(
        grad_placements=[Partial() if placement.is_replicate() else placement]
    )


def _adapted_columns(module: AdaptedLinear, tp: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """The forward of a linear whose output features are sharded, on a replicated input."""
    assert isinstance(x, DTensor)
    out = nn.functional.linear(x, module.weight, module.bias)
    update = _local_update(module, x.to_local(grad_placements=[Partial()]))
    return out + DTensor.from_local(update, tp, [Shard(-1)], run_check=False)


def _adapted_rows(module: AdaptedLinear, tp: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """The forward of a linear whose input features are sharded: a partial sum, which is reduced
    once."""
    assert isinstance(x, DTensor)
    out = nn.functional.linear(x, module.weight)
    update = _local_update(module, x.to_local())
    return out + DTensor.from_local(update, tp, [Partial()], run_check=False)


def _own_positions(tp: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass the positions of this rank's shard of the sequence to dropout."""
    x_BSD, rng_keys_B, positions_BS = inputs
    return x_BSD, rng_keys_B, positions_BS.chunk(tp.size(), dim=1)[tp.get_local_rank()]


def _gathered_for_heads(
    tp: DeviceMesh, stream: Placement, module: nn.Module, inputs: tuple[Any, ...], x: torch.Tensor
) -> torch.Tensor:
    """Gather what all heads read along the sequence. Its gradient is the sum over all heads, of
    which a rank has some."""
    whole = DTensor.from_local(x, tp, [stream], run_check=False)
    whole = whole.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


class _Gathered(ParallelStyle):
    """Gather the module's first input along the sequence, once for all matrices that read it."""

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
    """Replicated weights and replicated computation on the entire sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return first, *inputs[1:]

        _replicate_rest(module, device_mesh)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda part, inputs, output: output.to_local())
        return module


class _LinearOnShard(ParallelStyle):
    """A linear with replicated weights, on this rank's shard of the sequence.

    Computed without DTensor, which cannot flatten a sharded sequence behind a batch in torch
    2.11."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate_rest(module, device_mesh)
        module.forward = partial(self._forward, module)
        return module

    def _forward(self, module: nn.Module, x_BSD: torch.Tensor) -> torch.Tensor:
        # Each rank has the gradient of its tokens.
        weight, bias = (
            parameter.to_local(grad_placements=[Partial()])
            if isinstance(parameter, DTensor)
            else None
            for parameter in (module.weight, module.bias)
        )
        assert weight is not None
        out = nn.functional.linear(x_BSD, weight, bias)
        return out + _local_update(module, x_BSD) if isinstance(module, AdaptedLinear) else out


class _LocalColumns(ParallelStyle):
    """A linear without bias whose output features are sharded, on an input of plain tensors that
    every rank has. The gradient of the input is this rank's part, which `AcrossHeads` sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, Shard(0)))
        module.forward = partial(self._forward, module)
        return module

    def _forward(self, module: nn.Module, x_BSD: torch.Tensor) -> torch.Tensor:
        assert module.bias is None
        weight = module.weight
        assert isinstance(weight, DTensor)
        out = nn.functional.linear(x_BSD, weight.to_local())
        return out + _local_update(module, x_BSD) if isinstance(module, AdaptedLinear) else out


class _RowsWithBias(ParallelStyle):
    """A linear whose input features are sharded, and whose bias is added to the sum of the ranks'
    products. torch's RowwiseParallel redistributes the bias implicitly (2.13)."""

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = _distributed(module.weight, device_mesh, Shard(1))  # pyright: ignore[reportArgumentType]
        module.register_parameter("weight", weight)
        _replicate_rest(module, device_mesh)
        module.forward = partial(self._forward, module, device_mesh)
        return module

    def _forward(self, module: nn.Module, tp: DeviceMesh, x_BSF: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, DTensor) and isinstance(bias, DTensor)
        features = DTensor.from_local(x_BSF, tp, [Shard(-1)], run_check=False)
        if isinstance(module, AdaptedLinear):
            parts = _adapted_rows(module, tp, features)
        else:
            parts = nn.functional.linear(features, weight)
        assert isinstance(parts, DTensor)
        out_BSD = parts.redistribute(placements=[self._stream]).to_local()
        # Each rank has the gradient of its positions.
        gradient: Placement = Partial() if self._stream.is_shard() else Replicate()
        return out_BSD + bias.to_local(grad_placements=[gradient])


class _HeadWeights(ParallelStyle):
    """A weight per head, of which each rank has those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, Shard(0)))
        module.register_forward_hook(lambda part, inputs, output: output.to_local())
        return module


class _AllHeads(ParallelStyle):
    """A norm of all heads, of which each rank has some."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AllHeadsNorm)
        group = device_mesh.get_group()
        module.register_parameter("weight", _distributed(module.weight, device_mesh, Shard(0)))
        module.sum_over_heads = partial(all_reduce, group=group)
        module.forward = partial(self._forward, module)
        return module

    def _forward(self, module: AllHeadsNorm, x_BSHE: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, DTensor)
        return module.normalized(x_BSHE, weight.to_local())


class _Embedding(ParallelStyle):
    """An embedding sharded over the vocabulary: each rank looks up the tokens of its own rows."""

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
        first, num_rows = _RowsOfRank(tp, weight.shape[0]).first, rows_VD.shape[0]
        indices_BS = tokens_BS - first
        is_elsewhere_BS = (indices_BS < 0) | (indices_BS >= num_rows)
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            padding = padding - first if first <= padding < first + num_rows else None
        found_BSD = nn.functional.embedding(
            indices_BS.masked_fill(is_elsewhere_BS, 0),
            rows_VD,
            padding_idx=padding,
        )
        found_BSD = found_BSD.masked_fill(is_elsewhere_BS[..., None], 0)
        parts = DTensor.from_local(found_BSD, tp, [Partial()], run_check=False)
        return parts.redistribute(placements=[self._stream]).to_local()


class _Output(ParallelStyle):
    """The output projection, sharded over the vocabulary, with the loss computed on the shards.

    Without `loss_parallel` every rank projects onto the entire vocabulary.
    """

    def __init__(self, stream: Placement, *, loss_parallel: bool) -> None:
        super().__init__()
        self._stream = stream
        self._placement: Placement = Shard(0) if loss_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, OutputProjection):
            raise ConfigError(
                f'A {type(module).__name__} is sharded as "output", which is for an '
                "OutputProjection: use that, or another style."
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, self._placement))
        module.forward = partial(self._forward, module, device_mesh)
        return module

    def _forward(
        self,
        module: OutputProjection,
        tp: DeviceMesh,
        hidden_BSD: torch.Tensor,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
    ) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, DTensor)
        hidden = DTensor.from_local(hidden_BSD, tp, [self._stream], run_check=False)
        hidden = hidden.redistribute(placements=[Replicate()])
        is_sharded = self._placement.is_shard()
        if loss is None or targets_BS is None:
            logits = nn.functional.linear(hidden, weight, module.bias)
            assert isinstance(logits, DTensor)
            return module.capped(logits.redistribute(placements=[Replicate()]).to_local())
        # With sharded weights the gradient of the hidden states is a partial sum, which one
        # reduce-scatter sums and shards along the sequence.
        gradient: Placement = Partial() if is_sharded else Replicate()
        local = hidden.to_local(grad_placements=[gradient])
        bias = module.bias.to_local() if isinstance(module.bias, DTensor) else None
        shard = _RowsOfRank(tp, weight.shape[0]) if is_sharded else None
        return module.loss_of(loss, local, weight.to_local(), bias, targets_BS, shard=shard)


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
