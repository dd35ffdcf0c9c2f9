"""Snapshots copied from a GPU during training equal the state of their step, bit by bit."""

import shutil
from pathlib import Path

import pytest

from tests.gpu.conftest import Figure
from tests.gpu.ranks import run_ranks
from tests.gpu.training import long_text, train_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_checkpoints_under_load_equal_the_state(offload: bool, device: str, tmp_path: Path) -> None:
    (ours,) = run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=device,
        overrides={
            "checkpoint.enable": True,
            "checkpoint.interval": 2,
            "checkpoint.ram_interval": 1,
            "checkpoint.keep_latest_k": 0,
            "checkpoint.enable_first_step_checkpoint": False,
            "training.enable_cpu_offload": offload,
            "training.steps": 13,
        },
        keeps_saved_states=True,
    )
    # A save that is due while another is written is left out.
    assert {"2"} < set(ours["saved"])
    assert {step: names for step, names in ours["saved"].items() if names} == {}


@pytest.mark.alone
def test_snapshots_of_9_GB(cuda: str, tmp_path: Path, figure: Figure) -> None:
    if shutil.disk_usage("/dev/shm").free < 30e9:
        pytest.skip("three snapshots need 30 GB of shared memory")
    arguments = {
        "model.flavor": "four_blocks_of_1B",
        "training.mixed_precision_param": "bfloat16",
        "training.steps": 31,
        "training.seq_len": 1024,
        "training.dataset_path": str(long_text(tmp_path)),
        # Otherwise the losses of two runs differ, on few texts by several percent.
        "debug.deterministic": True,
        # Only the weights are written to disk, at the end: a slow disk would decide how long the
        # test takes.
        "checkpoint.interval": 1000,
        "checkpoint.ram_interval": 10,
        "checkpoint.last_save_model_only": True,
        "checkpoint.enable_first_step_checkpoint": False,
    }
    plain, saving = (
        run_ranks(
            train_job,
            tmp_path / name,
            folder=str(tmp_path / f"{name}_files"),
            device=cuda,
            overrides=arguments | {"checkpoint.enable": name == "saving"},
            keeps_saved_states=False,
        )[0]
        for name in ("plain", "saving")
    )
    num_bytes = saving["state_bytes"]
    stalls = [saving["stall_s"][step - 1] for step in (20, 30)]
    extra_s = sum(saving["step_s"][10:30]) - sum(plain["step_s"][10:30])
    figure("4 blocks of 1B: stall per save", max(stalls), "s")
    figure("4 blocks of 1B: extra wall time per save", extra_s / 2, "s")
    rate = num_bytes / max(extra_s / 2, 1e-3) / 1e9
    figure("4 blocks of 1B: state per extra wall time of a save", rate, "GB/s")
    assert saving["losses"] == plain["losses"]
    # As long as a copy over PCIe 3 would take, which training does not wait for.
    assert max(stalls) < num_bytes / 12e9
