"""The copy of the model that generates text: sharded, and with the newest weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.training import text_generator
from torchtitan_lite.training.text_generator import TextGenerator, _copy


def test_the_copy_is_sharded_before_it_has_memory(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(
        text_generator,
        "parallel_inference",
        SimpleNamespace(
            inference_degrees=lambda spec, world_size: mesh.degrees,
            apply=lambda model, spec, mesh: log.append("sharded"),
        ),
    )
    monkeypatch.setattr(text_generator, "allocate_memory", lambda *given: log.append("allocated"))
    monkeypatch.setattr(text_generator, "BatchGenerator", lambda *given: None)
    unused: Any = None
    TextGenerator(nn.Linear(1, 1), unused, mesh, unused, seed=1)
    assert log == ["sharded", "allocated"]


def test_weights_are_copied_by_name(mesh: Mesh) -> None:
    given = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    wanted = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    _copy(given, mesh, wanted, mesh)
    assert all(torch.equal(wanted[name], given[name]) for name in given)
