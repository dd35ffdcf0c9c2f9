"""The repeated blocks of a model, found by its spec's pattern. Layer: above spec."""

from fnmatch import fnmatchcase

from torch import nn

from torchtitan_lite.spec import ModelSpec


def modules_matching(model: nn.Module, *patterns: str) -> list[nn.Module]:
    """The modules whose name matches a pattern at the pattern's own depth, in model order."""
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, p) and name.count(".") == p.count(".") for p in patterns)
    ]


def blocks_of(model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The repeated blocks, in model order."""
    return modules_matching(model, spec.blocks)
