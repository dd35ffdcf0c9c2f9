"""Every technique is applied, from the innermost to the outermost."""

from typing import Any

import pytest
from torch import nn

from torchtitan_lite import parallel
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.parallel import inference, parallelize

_TECHNIQUES = (
    *("float8.apply", "expert.apply", "tensor.apply", "context.apply"),
    *("activation_checkpoint.apply_to_operations", "compile.apply"),
    *("activation_checkpoint.apply_to_blocks", "fsdp.apply"),
)


def record(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[str]:
    applied: list[str] = []
    for name in names:
        module, _, function = name.partition(".")
        monkeypatch.setattr(
            getattr(owner, module), function, lambda *given, n=name, **named: applied.append(n)
        )
    return applied


def test_training(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    applied = record(monkeypatch, parallel, *_TECHNIQUES)
    unused: Any = None
    parallelize(
        nn.Linear(1, 1), unused, mesh,
        parallelism=unused, precision=unused, checkpointing=unused, compilation=CompileConfig(),
    )  # fmt: skip
    assert applied == [*_TECHNIQUES]


def test_inference(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    """Tensor parallelism replicates what no rule matches, so experts precede it."""
    applied = record(monkeypatch, inference, "expert.apply", "tensor.apply")
    unused: Any = None
    inference.apply(nn.Linear(1, 1), unused, mesh)
    assert applied == ["expert.apply", "tensor.apply"]
