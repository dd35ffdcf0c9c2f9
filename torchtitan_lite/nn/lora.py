"""Low-rank adapters beside frozen weights (LoRA, arXiv:2106.09685).

Beside the legend in `spec.py`: I, O input and output features of a linear layer R rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.config.tables.lora import LoRAConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.moe import Router
from torchtitan_lite.nn.spec import InitRule, ModelCost, ModelSpec

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of an adapter's parameters in its layer: [R, I] and [O, R]."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer plus a trained update of low rank: W x + scale * B (A x)."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float) -> None:
        """`base` provides the weight and the bias. `scale` is the factor of the update."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.scale = scale
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., I] -> [..., O]."""
        return super().forward(x) + self.update(x, self.lora_a, self.lora_b)

    def update(self, x: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
        """Return the update of [..., I] by the matrices of the adapter, or shards of them."""
        return F.linear(F.linear(x, a_RI) * self.scale, b_OR)


def with_adapters(spec: ModelSpec, config: LoRAConfig) -> ModelSpec:
    """Return the spec of the model with frozen weights, and an adapter in each linear layer of a
    block that `config.targets` match. Raises ConfigError if a pattern matches none.

    A is drawn as PEFT does, B is zero, so that training starts from the frozen model.
    """
    with torch.device("meta"):
        model = spec.build()
    sizes = {name: module.weight.shape for name, module in _candidates(model, spec)}
    chosen = _chosen(list(sizes), config.targets)
    num_added = sum(config.rank * sum(sizes[name]) for name in chosen)

    def build() -> nn.Module:
        model = spec.build().requires_grad_(False)
        for name in chosen:
            parent, _, leaf = name.rpartition(".")
            base = model.get_submodule(name)
            assert isinstance(base, nn.Linear)
            adapted = AdaptedLinear(base, rank=config.rank, scale=config.scale)
            setattr(model.get_submodule(parent), leaf, adapted)
        return model

    def cost(seq_len: int) -> ModelCost:
        base = spec.cost(seq_len)
        # Without attention. A third of it would be for the gradients of the frozen matrices.
        matrices = spec.cost(0).flops_per_token
        return ModelCost(
            num_params=base.num_params + num_added,
            num_active_params=base.num_active_params + num_added,
            flops_per_token=base.flops_per_token - matrices // 3 + 6 * num_added,
        )

    return replace(
        spec,
        build=build,
        init=(
            InitRule(pattern=f"*.{LORA_A}", kind="fan_in_uniform"),
            InitRule(pattern=f"*.{LORA_B}", kind="zeros"),
            *spec.init,
        ),
        cost=cost,
    )


def layers_with_adapters(spec: ModelSpec) -> list[str]:
    """Return the names of the layers that have an adapter in the model of a spec."""
    with torch.device("meta"):
        model = spec.build()
    return [name for name, module in model.named_modules() if isinstance(module, AdaptedLinear)]


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add each update to the weight of its layer, and zero it, in place. The shards of an adapter
    must be those of tensor parallelism, so that their product is the shard of the weight."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            a_RI, b_OR, weight_OI = map(local_tensor, (module.lora_a, module.lora_b, module.weight))
            weight_OI.copy_(merged(weight_OI, a_RI, b_OR, module.scale))
            b_OR.zero_()


def merged(
    weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return a weight plus its update, in the weight's dtype; computed in at least float32."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    update_OI = b_OR.to(wide) @ a_RI.to(wide) * scale
    return (weight_OI.to(wide) + update_OI).to(weight_OI.dtype)


def _candidates(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the blocks, without routers, by name."""
    routers = tuple(name for name, module in model.named_modules() if isinstance(module, Router))
    for name, module in model.named_modules():
        is_routing = any(name.startswith(f"{router}.") for router in routers)
        is_in_block = fnmatchcase(name, f"{spec.blocks}.*")
        if isinstance(module, nn.Linear) and is_in_block and not is_routing:
            yield name, module


def _chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names whose end matches a pattern. Raises ConfigError if a pattern matches none,
    with the names that exist."""

    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(f".{name}", f"*.{pattern}")

    wrong = [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
    if wrong or not patterns:
        listed = ", ".join(f'"{pattern}"' for pattern in wrong) or "[]"
        kinds = dict.fromkeys(name.split(".", 2)[-1] for name in names)
        raise ConfigError(
            f"lora.targets: {listed} matches no linear layer. Use the ends of names in this "
            f"project, of {', '.join(kinds) or 'which this model has none'}; stacked experts, "
            "routers, embedding and output have no adapters."
        )
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]
