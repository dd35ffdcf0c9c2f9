"""Plans of launches: each replica gets its own GPUs."""

from pathlib import Path

import pytest

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan, visible_gpus


def _plan(devices: str | None, *, num_replicas: int = 2, uses_gpus: bool = True) -> LaunchPlan:
    return LaunchPlan(
        num_replicas=num_replicas,
        ranks=(1, 2),
        process_command=lambda replica: [],
        lighthouse_command=lambda address: [],
        dump_folder=Path("outputs"),
        log_dir=Path("logs"),
        environment={} if devices is None else {"CUDA_VISIBLE_DEVICES": devices},
        uses_gpus=uses_gpus,
    )


def test_replicas_share_no_gpu() -> None:
    plan = _plan("4,GPU-a,6, 7,8")
    assert plan.devices_of(0) == {"CUDA_VISIBLE_DEVICES": "4,GPU-a"}
    assert plan.devices_of(1) == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize("plan", [_plan(""), _plan("-1"), _plan("0", uses_gpus=False)])
def test_replicas_on_cpus_get_no_variable(plan: LaunchPlan) -> None:
    assert plan.devices_of(0) == {}


def test_too_few_gpus_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"2 replicas of 2 ranks need 4 GPUs, .* has 3\."):
        _plan("0,1,2").devices_of(0)
    # Of three replicas each needs as many as the largest mesh has ranks.
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks need 6 GPUs"):
        _plan("0,1,2,3,4", num_replicas=3).devices_of(0)
    plan = _plan("0,1,2,3,4,5", num_replicas=3)
    assert plan.devices_of(2) == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["1"]
    # CUDA ignores what follows an invalid name.
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ["0"]
