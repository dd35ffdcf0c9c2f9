from importlib.util import find_spec

import pytest

from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.training.metrics import open_metrics
from torchtitan_lite.training.metrics.wandb import _run_id

pytestmark = pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_one_clear_error_on_every_rank(tmp_path, rank):
    with pytest.raises(UserError, match="pip install wandb"):
        open_metrics(
            MetricsConfig(enable_wandb=True),
            folder=tmp_path,
            rank=rank,
            is_leader=rank == 0,
            total_steps=1,
            resume_step=0,
            run_config={},
        )
    assert not list(tmp_path.iterdir())


def test_a_folder_named_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    from torchtitan_lite.core.optional_dependencies import require

    with pytest.raises(UserError, match="not installed"):
        require("wandb", "metrics.enable_wandb = true")


def test_only_a_resume_continues_a_run(tmp_path):
    path = tmp_path / "run_id"
    first = _run_id(path, resume_step=0)
    assert _run_id(path, resume_step=7) == first
    assert _run_id(path, resume_step=0) != first
    # A run that had no metrics before.
    assert _run_id(tmp_path / "other", resume_step=7) not in ("", first)
