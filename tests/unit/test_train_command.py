"""What `train` checks before it starts processes and before it resizes a run, and its ranks."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import REPOSITORY
from torchtitan_lite.cli import train as command
from torchtitan_lite.cli import train_agents
from torchtitan_lite.cli.rank_counts import main as check_ranks
from torchtitan_lite.cli.train_options import TrainOptions
from torchtitan_lite.cli.train_rank import _errors_outlive_sigterm
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import TRANSIENT, ConfigError
from torchtitan_lite.core.run_lease import FolderInUse
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    RunMesh,
)
from torchtitan_lite.training import run_folder


def test_no_process_starts_in_a_folder_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_in_use(config: Config) -> None:
        raise FolderInUse("it is in use")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "checked_config", lambda *_: (Config(), None))
    monkeypatch.setattr(run_folder, "check_folder", is_in_use)
    monkeypatch.setattr(command, "run_local_ranks", lambda *_: pytest.fail("it starts"))
    assert command.run_train(["--nproc", "2"]) == TRANSIENT


def test_a_resize_changes_only_what_a_resize_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_agents, "checked_config", lambda *_: (Config(), None))
    compared: list[Any] = []
    monkeypatch.setattr(train_agents, "check_live_resize", lambda *_, **__: compared.append(_))
    check = train_agents.resize_check([], TrainOptions(num_ranks=2), Config())
    check(ResizeRequest(mesh=RunMesh(3)))
    assert len(compared) == 1
    with pytest.raises(ConfigError, match="a resize changes"):
        check(ResizeRequest(mesh=RunMesh(3, ("--training.steps=9",))))


def test_a_config_is_checked_for_all_numbers_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    config = REPOSITORY / "configs" / "llama3_debug.toml"
    arguments = ["--", f"--config={config}", "--parallelism.data_parallel_shard_degree=2"]
    assert check_ranks(["2", *arguments]) == 0
    assert check_ranks(["3", *arguments]) == 1
    assert capsys.readouterr().err


def test_a_spare_imports_training() -> None:
    command._import_rank()
    assert "torchtitan_lite.training.trainer" in sys.modules


def test_a_rank_starts_without_the_compiler(tmp_path: Path) -> None:
    """Importing it takes half a second, which a restarted rank would add to its recovery."""
    compiler = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining")
    arguments = [
        "train",
        *("--config", "configs/llama3_debug.toml", "--job.device", "cpu"),
        *("--model.flavor", "tiny", "--training.steps", "1", "--training.seq_len", "32"),
        *("--training.dataset_path", "tests/assets/fixture.jsonl"),
        *("--training.held_out_fraction", "0", "--validation.enable", "false"),
        *("--metrics.enable_tensorboard", "false", "--job.dump_folder", str(tmp_path)),
    ]
    code = (
        "import sys; from torchtitan_lite.cli import main; "
        "import torchtitan_lite.fault_tolerance.replica.joining; "
        f"status = main({arguments!r}); assert status == 0; "
        f"assert not {set(compiler)!r} & sys.modules.keys(), sys.modules.keys() & {set(compiler)!r}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_sigterm_does_not_cut_short_the_report_of_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with _errors_outlive_sigterm():
            pass
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(RuntimeError, match="inside"), _errors_outlive_sigterm():
            raise RuntimeError("inside")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
