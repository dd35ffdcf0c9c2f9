"""Every TOML in configs/ loads, is consistent, and builds its model without allocating it."""

from pathlib import Path

import pytest
import torch

from tests.harness.ranks import REPOSITORY
from torchtitan_lite.config import to_toml
from torchtitan_lite.models import model_spec
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import load_config

CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_builds(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [])
    if config.model.hf_assets_path is not None:
        config = load_config(path, ["--model.hf_assets_path", str(tmp_path)])
    check_against(config, world_size=2)
    spec = model_spec(config.model)
    with torch.device("meta"):
        model = spec.build()
    assert sum(p.numel() for p in model.parameters()) == spec.cost(8).num_params
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml", []) == config


def test_there_are_configs() -> None:
    assert "llama3_debug" in [path.stem for path in CONFIGS]
