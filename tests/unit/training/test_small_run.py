"""A run of some steps with every part of the product. Its ranks are threads."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness.jobs import odd_config
from tests.harness.threads import run_on_threads
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.preemption import StopRequest, TrainingLeft
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, resolve_degrees
from torchtitan_lite.training import final_export
from torchtitan_lite.training.builders import build, model, spec_on_device
from torchtitan_lite.training.summary import print_end, print_start, start_rows
from torchtitan_lite.training.trainer import train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_BATCH, _STEPS = 8, 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Threads that build models at the same time must not change the default to and fro."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _run(
    folder: Path,
    overrides: dict[str, Any],
    stops: Callable[[int], bool],
    is_signal: bool,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Train, and return what happened. `stops` says after how many steps a stop is requested: by a
    signal, or else by an order to leave."""
    config = odd_config(folder, {"training.steps": _STEPS, **overrides})
    reports: list[Any] = []
    stop = StopRequest(lambda: not is_signal and stops(len(reports)))

    def watch(state: Any, report: Any) -> None:
        reports.append(report)
        stop.was_signaled = is_signal and stops(len(reports))

    with build(config, mesh or _mesh(config), stop) as built:
        job, ledger, contexts = built.job, mock.Mock(), []
        enter_step = job.step_context

        def context(number: int) -> Any:
            contexts.append(number)
            return enter_step(number)

        def spy(owner: Any, name: str) -> Any:
            return mock.patch.object(owner, name, wraps=getattr(owner, name))

        with (
            spy(job.state.loader, "load") as load,
            spy(job.state.loader, "prefetch") as prefetch,
            spy(job.replicas, "finish_step") as finish_step,
            spy(job.checkpoints, "apply_signals") as apply_signals,
        ):
            print_start(built, config)
            job = replace(job, hooks=[*job.hooks, watch], ledger=ledger, step_context=context)
            try:
                finished = train(job)
            except TrainingLeft:
                finished = None
        with mock.patch("torchtitan_lite.training.summary._sample_lines", lambda *_: []):
            print_end(built, config, [], finished=bool(finished))
        assert all(one.grad is None for one in job.state.model.parameters())
        return {
            "finished": finished,
            "numbers": [report.number for report in reports],
            "contexts": contexts,
            "loaded": [call.args[1] for call in load.call_args_list],
            "samples": [call.args[0] for call in load.call_args_list],
            "prefetched": [call.args[1] for call in prefetch.call_args_list],
            "last": [call.kwargs["is_last"] for call in finish_step.call_args_list],
            "signals": apply_signals.call_count,
            "ledger": [(name, *args[:2]) for name, args, _ in ledger.mock_calls],
            "tracker": built.goodput_tracker is not None,
        }


def _mesh(config: Config) -> Mesh:
    return Mesh(detect_device("cpu"), resolve_degrees(config.parallelism, dist.get_world_size()))


def _never(step: int) -> bool:
    return False


def test_a_run_takes_its_steps_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = {"training.local_batch_size": 2}
    runs = run_on_threads(2, _run, tmp_path, local, _never, False)
    for rank, run in enumerate(runs):
        steps = [1, 2, 3]
        firsts = [[cursor + 2 * rank, cursor + 4 + 2 * rank] for cursor in (0, 8, 16)]
        assert run["samples"] == [[range(one, one + 2) for one in rows] for rows in firsts]
        assert run["numbers"] == run["contexts"] == run["loaded"] == steps
        # The samples of the next step are read during a step, if there is one.
        assert run["prefetched"] == [2, 3]
        assert run["last"] == [False, False, True] and run["finished"] is True
        assert run["signals"] == _STEPS
        assert run["ledger"] == [
            entry
            for step in steps
            for entry in (("begin", step, (step - 1) * _BATCH), ("end", "commit", step))
        ]
    assert [run["tracker"] for run in runs] == [True, False]
    printed = capsys.readouterr().out
    assert printed.count("2 processes: dp_shard 2\n") == printed.count("Outputs ") == 1
    assert "new, with initial weights drawn from the seed" in printed
    assert (tmp_path / "config.toml").exists()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if line.get("event") == "start"] == [0]


@pytest.mark.parametrize(
    ("stop_at", "is_signal", "num_steps", "finished"),
    [(1, True, 2, False), (3, True, 3, True), (1, False, 2, None), (2, False, 3, True)],
)
def test_a_run_ends_after_the_step_in_which_it_is_asked_to(
    tmp_path: Path, stop_at: int, is_signal: bool, num_steps: int, finished: bool | None
) -> None:
    """None: its ranks leave for another mesh."""
    (run,) = run_on_threads(1, _run, tmp_path, {}, lambda step: step >= stop_at, is_signal)
    assert run["finished"] is finished
    assert run["numbers"] == [*range(1, num_steps + 1)]
    assert run["last"] == [False] * (num_steps - 1) + [True]


def test_a_run_resumes_and_a_finished_one_ends_at_once(
    mesh: Mesh, tmp_path: Path, logged: pytest.LogCaptureFixture, capsys: Any
) -> None:
    saving = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled"}
    logged.set_level(logging.INFO, "torchtitan_lite")
    first = _run(tmp_path, saving, lambda step: step >= 1, True, mesh)
    assert (first["finished"], first["numbers"]) == (False, [1, 2])
    assert "Stopped at step 2 of 3 on request." in capsys.readouterr().out
    assert (tmp_path / "checkpoint" / "assets" / "tokenizer.json").exists()
    assert (tmp_path / "config.toml").exists()
    second = _run(tmp_path, saving, _never, False, mesh)
    assert not any("steps of this run are done" in text for text in logged.messages)
    assert (second["finished"], second["numbers"]) == (True, [3])
    assert f"resumed from {tmp_path}" in capsys.readouterr().out
    third = _run(tmp_path, saving, _never, False, mesh)
    assert (third["finished"], third["numbers"]) == (True, [])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [(line["event"], line["step"]) for line in lines if "event" in line]
    assert events == [("start", 0), ("saved", 1), ("resume", 2), ("start", 2), ("resume", 3)]
    assert logged.messages.count("All 3 steps of this run are done.") == 1
    base = str(tmp_path / "checkpoint" / "step-3")
    _run(tmp_path / "other", saving | {"checkpoint.initial_load_path": base}, _never, False, mesh)
    assert f"new, with initial weights from {base}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [({"expert": 2}, "dp_shard 2 x ep 2"), ({"tensor": 2, "expert_tensor": 2}, "tp 2 x etp 2")],
)
def test_the_start_shows_the_axes_of_several_ranks(
    tmp_path: Path, degrees: dict[str, int], axes: str
) -> None:
    overrides = {"model.name": "qwen3", "model.flavor": "many_experts"}
    sizes = {f"parallelism.{axis}_parallel_degree": size for axis, size in degrees.items()}

    def mesh_row() -> str:
        config = odd_config(tmp_path, {**overrides, **sizes})
        with build(config, _mesh(config), StopRequest()) as built:
            return start_rows(built, config)["Mesh"]

    assert run_on_threads(2, mesh_row) == [f"2 processes: {axes}"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_documents_take_flex_attention_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    overrides = {"model.flavor": "debugmodel", "model.attention_mask": "document"}
    config = odd_config(tmp_path, {**overrides, "training.mixed_precision_param": dtype})
    gpu: Any = SimpleNamespace(kind="cuda")
    with mock.patch.object(model, "trained_spec", wraps=model.trained_spec) as trained_spec:
        spec_on_device(config, gpu)
    found = [call.args[0].model.attention_backend for call in trained_spec.call_args_list]
    assert found == ["auto", "flex"]


def test_all_ranks_export_the_step_that_the_leader_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prepare: object) -> None:
        raise CheckpointError("The disk is full.")

    monkeypatch.setattr(final_export, "export_on_all_ranks", fail)
    config = odd_config(tmp_path, {})

    # Only the leader sees the newest step yet.
    storage = SimpleNamespace(steps=lambda: [1, 5] if dist.get_rank() == 0 else [1])
    monkeypatch.setattr(final_export, "open_storage", lambda root: storage)

    def export() -> str:
        with pytest.raises(CheckpointError) as raised:
            final_export.export_last_save(config, "root", tmp_path)
        return str(raised.value)

    texts = run_on_threads(2, export)
    assert all(text.startswith("Step 5 is saved in root, but could not be") for text in texts)
