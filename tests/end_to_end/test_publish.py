"""A run publishes its weights, and processes that are not part of it use them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end.publishing import publishing_run
from tests.harness import launch
from tests.harness.ranks import run_command
from torchtitan_lite.serving.publish import Subscriber, Target, hugging_face_targets
from torchtitan_lite.serving.publish.hugging_face import hugging_face_config
from torchtitan_lite.serving.publish.sources import PUBLISHED_FILE, read_json

_FAMILIES = {
    "llama3": (),
    "qwen3": ("--model.name=qwen3", "--model.flavor=tiny_moe"),
    "llama4": ("--model.name=llama4",),
    "deepseek_v3": ("--model.name=deepseek_v3",),
    "gpt_oss": ("--model.name=gpt_oss",),
    "qwen3_next": ("--model.name=qwen3_next",),
}


@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        *(pytest.param(one, marks=pytest.mark.matrix) for one in _FAMILIES if one != "llama3"),
    ],
)
def test_a_transformers_model_receives_what_was_trained(family: str, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "hf"
    with publishing_run(run, *_FAMILIES[family]):
        subscriber = Subscriber(str(run))
        (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(subscriber)))
        config = AutoConfig.from_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state = model.state_dict()
        subscription = subscriber.subscribe(hugging_face_targets(subscriber, state))
        update = subscription.update(timeout_s=60)
        assert update is not None
        step = run / "checkpoint" / f"step-{update.version}"
        launch.wait_until((step / "manifest.json").exists, 60)
        received = {name: tensor.clone() for name, tensor in state.items()}
    run_command("convert", "to-hf", str(step), str(out), "--drop-expert-bias")
    # Its names may differ from those in the folder: it stacks experts.
    expected = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert received.keys() == expected.keys() and len(expected) > 10
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


def test_versions_continue_after_a_restart_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with publishing_run(run):
        subscriber = Subscriber(str(run))
        subscription = subscriber.subscribe(
            Target(name, torch.empty(spec.shape, dtype=spec.dtype))
            for name, spec in subscriber.tensors.items()
        )
        assert subscription.update(timeout_s=60) is not None
    held = subscription.version or 0
    # On another number of ranks.
    with publishing_run(run, ranks=1):
        update = subscription.update(timeout_s=90)
        assert update is not None and update.version > held
        assert update.num_bytes_unchanged == 0


def test_the_command_writes_folders_that_transformers_loads(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with publishing_run(run, "--publish.every_steps=2", "--publish.dtype=bfloat16"):
        output = run_command("subscribe", str(run), "--out", str(out), "--versions", "3")
    assert output.count("MiB changed") == 3
    written = sorted(out.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    assert len(written) == 2 and not any(path.name.startswith(".") for path in written)
    assert all(int(path.name.rpartition("-")[2]) % 2 == 0 for path in written)
    model = AutoModelForCausalLM.from_pretrained(written[-1])
    assert model.dtype == torch.bfloat16
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    os.environ.pop("TORCHTITAN_LITE_TOKEN", None)
    failed = run_command("subscribe", str(tmp_path), "--timeout", "1", status=1)
    assert "publishes no weights" in failed and "Traceback" not in failed


@pytest.mark.matrix
def test_the_command_receives_deltas_from_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "0123456789abcdef0123456789abcdef")
    small_steps = ("--optimizer.lr=1e-6", "--lr_scheduler.warmup_steps=0")
    settings = ("--publish.address=127.0.0.1", "--publish.deltas=true", "--publish.dtype=bfloat16")
    with publishing_run(run, *settings, *small_steps, "--publish.keep_versions=8"):
        url = read_json((run / PUBLISHED_FILE).read_bytes())["url"]
        output = run_command("subscribe", url, "--versions", "4")
    first, *later = re.findall(r"MiB changed, (.*)received in", output)
    assert first == "" and len(later) == 3
    assert all(re.fullmatch(r"[0-2]\.\d MiB ", received) for received in later), output


@pytest.mark.matrix
def test_the_client_imports_little() -> None:
    code = (
        "import sys, torchtitan_lite.serving.publish; "
        "bad = {'torchft', 'datasets', 'tensorboard', 'transformers'} & set(sys.modules); "
        "print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_text_is_generated_by_each_version(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prompt = ("--prompt", "def ", "--temperature", "0", "--max-new-tokens", "8")
    with publishing_run(run):
        step = run / "checkpoint" / "step-1"
        launch.wait_until((step / "manifest.json").exists, 60)
        output = run_command(
            "generate", str(step), *prompt, "--subscribe", str(run), "--versions", "2"
        )
        versions = re.findall(r"Version (\d+), received", output)
        assert len(versions) == 2
        last = run / "checkpoint" / f"step-{versions[-1]}"
        launch.wait_until((last / "manifest.json").exists, 60)
    expected = run_command("generate", str(last), *prompt)
    (text,) = re.findall(r"^def .*?(?=^\d+ tokens in)", expected, re.DOTALL | re.MULTILINE)
    assert text in output
