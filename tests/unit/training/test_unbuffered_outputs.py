"""Outputs that delay the first step of a generation which must not write yet."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.jobs import odd_config
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.training import builders


@pytest.mark.parametrize("override", [
    {},
    {"metrics.enable_tensorboard": True},
    {"metrics.enable_wandb": True},
    {"metrics.prometheus_port": 9400},
    {"publish.enable": True},
    {"debug.sample_ledger": True},
    {"debug.trace_communication": True},
    {"profiling.enable_profiling": True},
    {"fault_tolerance.enable": True},
])  # fmt: skip
def test_outputs_that_others_read_meanwhile_are_not_buffered(
    override: dict[str, object], tmp_path: Path
) -> None:
    config = odd_config(tmp_path, {"debug.sample_ledger": False, **override})
    are_files = override.keys() <= {"metrics.enable_tensorboard"}
    assert builders._has_unbuffered_outputs(config) is not are_files


@pytest.mark.parametrize("kind", ["hooks", "sinks"])
def test_the_code_of_users_is_not_buffered(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = replace(REGISTRY, **{kind: [lambda context: None]})
    monkeypatch.setattr(builders, "REGISTRY", registry)
    config = odd_config(tmp_path, {"debug.sample_ledger": False})
    assert builders._has_unbuffered_outputs(config)
