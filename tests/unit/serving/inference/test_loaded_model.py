"""`load_model` and `generate` of the Python API, in one process and on ranks."""

import io
import json
import logging
import os
import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.hugging_face import add_tokenizer, in_transformers, make_folder
from tests.harness.ranks import WorkerPool
from torchtitan_lite.api import ParallelismConfig, generate, load_model, start_mesh
from torchtitan_lite.checkpoint import model_tensors
from torchtitan_lite.checkpoint.tensors import local_tensors
from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import CheckpointError, DataError, MeshError, UserError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.serving.inference import LoadedModel, encode_prompts, loaded_model, open_model

PROMPTS = ["import os", "def main() -> None:"]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "import"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a small Llama with a tokenizer."""
    return add_tokenizer(make_folder(tmp_path_factory.mktemp("model") / "hf", "llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu")


def state_of_the_process() -> dict[str, Any]:
    """Return what loading and generating must not change."""
    logger = logging.getLogger("torchtitan_lite")
    return {
        "environment": dict(os.environ),
        "handlers": [logging.root.handlers[:], logger.handlers[:], logger.level],
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "random": [random.getstate(), torch.get_rng_state().tolist()],
        "gradients": torch.is_grad_enabled(),
        "group": dist.is_initialized(),
    }


def test_greedy_text_is_that_of_transformers_and_of_the_command(
    folder: Path, tmp_path: Path
) -> None:
    before = state_of_the_process()
    loaded = load_model(folder, device="cpu")
    texts = generate(loaded, PROMPTS, max_new_tokens=12, temperature=0)
    assert state_of_the_process() == before
    theirs = in_transformers("AutoModelForCausalLM", folder, dtype=torch.float32)
    tokenizer = in_transformers("AutoTokenizer", folder)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        # Like every document in training, a prompt begins with the token of a beginning.
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt).input_ids]])
        mask, settings = torch.ones_like(ids), {"do_sample": False, "pad_token_id": 0}
        wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, **settings)
        assert text.ids == wanted[0, ids.shape[1] :].tolist()
        assert text.prompt == prompt and text.text == tokenizer.decode(text.ids)
        assert text.ended_by == "length"
    out = tmp_path / "texts.json"
    arguments = ["--max-new-tokens=12", "--temperature=0", "--device=cpu", f"--json={out}"]
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    assert main(["generate", str(folder), *prompts, *arguments]) == 0
    assert json.loads(out.read_text()) == [asdict(text) for text in texts]


def test_a_conversation_is_answered_as_by_the_command(
    loaded: LoadedModel, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    (answer,) = generate(loaded, [QUESTION], max_new_tokens=8, seed=3, top_p=0.9, stream=stream)
    assert answer.prompt == QUESTION and stream.getvalue() == answer.text
    out = tmp_path / "texts.json"
    arguments = ["--max-new-tokens=8", "--seed=3", "--top-p=0.9", "--device=cpu", f"--json={out}"]
    chat = ["--chat", "--prompt=import", "--system=Be brief."]
    assert main(["generate", str(folder), *chat, *arguments]) == 0
    (by_command,) = json.loads(out.read_text())
    assert by_command == asdict(answer) | {"prompt": "import"}
    assert capsys.readouterr().out == f"{answer.text}\n"
    assert answer.ids != generate(loaded, "import", max_new_tokens=8, seed=3, top_p=0.9)[0].ids


def test_samples_of_a_prompt_are_in_order(loaded: LoadedModel) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 6, "temperature": 3.0}
    texts = generate(loaded, PROMPTS, num_samples=2, **settings)
    assert [text.prompt for text in texts] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert texts[0].ids != texts[1].ids
    assert texts[::2] == generate(loaded, PROMPTS, **settings)
    assert generate(loaded, [], **settings) == []


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3", "mixtral"])
def test_logits_are_those_of_transformers_before_and_after_generating(
    family: str, tmp_path: Path
) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", family))
    loaded = load_model(str(folder), device="cpu")
    tokens_BS = torch.randint(0, 500, (2, 19), generator=torch.Generator().manual_seed(1))
    theirs = in_transformers("AutoModelForCausalLM", folder, dtype=torch.float32)
    with torch.no_grad():
        expected_BSV = theirs(tokens_BS).logits
    actual_BSV = loaded.logits(tokens_BS)
    torch.testing.assert_close(actual_BSV, expected_BSV, rtol=0, atol=1e-4)
    generate(loaded, PROMPTS, max_new_tokens=3)
    assert torch.equal(loaded.logits(tokens_BS), actual_BSV)
    with pytest.raises(UserError, match="300 tokens, but .* reads 256 positions"):
        loaded.logits(torch.zeros(1, 300, dtype=torch.int64))


def test_the_dtype_is_chosen_or_that_of_the_files(folder: Path, loaded: LoadedModel) -> None:
    double = load_model(folder, device="cpu", dtype=torch.float64)
    for one, dtype in ((loaded, torch.float32), (double, torch.float64)):
        assert {parameter.dtype for parameter in one.model.parameters()} == {dtype}
        assert not any(p.requires_grad for p in one.model.parameters()) and not one.model.training
        assert one.logits(torch.zeros(1, 4, dtype=torch.int64)).dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    assert (loaded.where, loaded.spec.name) == (str(folder), "llama3")
    assert loaded.config.model.flavor == "hf"


@pytest.mark.parametrize(
    ("prompts", "settings", "error"),
    [
        (PROMPTS, {"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        (PROMPTS, {"num_samples": -1}, "num_samples = -1"),
        (PROMPTS, {"top_p": 0}, r"top-p \(0\) must be above 0"),
        (PROMPTS, {"temperature": -1}, r"temperature \(-1\)"),
        (PROMPTS, {"stream": io.StringIO()}, "2 prompts with 1 samples each. Give one prompt"),
        (["a" * 3000], {}, "Prompt 1 has .* tokens, but .* 256 positions"),
        (QUESTION, {}, "neither a text nor a list of messages with a role. Give texts"),
        ([["import os"]], {}, "neither a text nor a list of messages"),
        ([[]], {}, "neither a text nor a list of messages"),
        (["a", QUESTION], {}, "1 prompts are texts and 1 are conversations"),
    ],
)
def test_errors_of_generate(
    prompts: Any, settings: dict[str, Any], error: str, loaded: LoadedModel
) -> None:
    with pytest.raises(UserError, match=error):
        generate(loaded, prompts, **settings)


def test_a_prompt_that_is_too_long_is_rejected_before_the_weights_are_loaded(
    folder: Path, mesh: Mesh
) -> None:
    files = open_model(str(folder), mesh)
    with pytest.raises(UserError, match=r"Prompt 2 has .* tokens, but .* 256 positions"):
        encode_prompts(files, ["a", "a" * 3000])


def test_errors_of_load_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="nowhere contains no checkpoint. Give the folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"dtype = torch.int8 is not .* torch.float64, "):
        load_model(folder, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json. .*in Python tokenizer=DIR"):
        load_model(folder, tokenizer=tmp_path, device="cpu")
    with pytest.raises(CheckpointError, match=r"no moving average .*in Python ema=True"):
        load_model(folder, ema=True, device="cpu")
    with pytest.raises(MeshError, match=r"degree 2 is not possible.* processes \(1\)"):
        load_model(folder, tensor_parallel=2, device="cpu")
    with start_mesh(device=detect_device("cpu")) as mesh:
        assert dist.is_initialized()
        with pytest.raises(UserError, match='device = "cuda", but the mesh is on cpu'):
            load_model(folder, mesh=mesh, device="cuda")
    (folder / "tokenizer_config.json").rename(tmp_path / "kept")
    template = folder / "chat_template.jinja"
    template.rename(tmp_path / "template")
    loaded = load_model(folder, device="cpu")
    with pytest.raises(DataError, match="has no chat template"):
        generate(loaded, [QUESTION])
    (tmp_path / "kept").rename(folder / "tokenizer_config.json")
    (tmp_path / "template").rename(template)
    # A script that was started by torchrun, without a mesh.
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match=r"there are 4. .*load_model\(path, mesh=mesh\)"):
        load_model(folder)
    assert not dist.is_initialized()


def on_a_mesh(folder: Path, parallelism: dict[str, Any], tensor_parallel: int | None) -> Any:
    """Return on one rank: the degrees, the texts, the logits, and the number of weights."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    device = detect_device("cpu")
    with start_mesh(ParallelismConfig.model_validate(parallelism), device=device) as mesh:
        loaded = load_model(folder, mesh=mesh, tensor_parallel=tensor_parallel)
        texts = generate(loaded, [*PROMPTS, "class"], max_new_tokens=9, num_samples=2, seed=5)
        stream = io.StringIO()
        (answer,) = generate(loaded, [QUESTION], max_new_tokens=5, stream=stream)
        assert stream.getvalue() == (answer.text if mesh.rank == 0 else "")
        logits_BSV = loaded.logits(torch.arange(12)[None])
        degrees = loaded.mesh.degrees
        held = sum(part.numel() for part in local_tensors(model_tensors(loaded.model)).values())
        return (degrees.dp_replicate, degrees.tp), [*texts, answer], logits_BSV, held


@pytest.mark.parametrize(
    ("parallelism", "tensor_parallel", "degrees"),
    [
        ({}, None, (1, 2)),
        ({}, 1, (2, 1)),
        ({"tensor_parallel_degree": 2}, None, (1, 2)),
    ],
)
def test_the_same_texts_on_two_ranks(
    parallelism: dict[str, Any],
    tensor_parallel: int | None,
    degrees: tuple[int, int],
    folder: Path,
    pools: Callable[[int], WorkerPool],
) -> None:
    _, expected, logits_BSV, num_weights = on_a_mesh(folder, {}, None)
    for found in pools(2).run(on_a_mesh, folder, parallelism, tensor_parallel):
        assert found[0] == degrees and found[1] == expected
        torch.testing.assert_close(found[2], logits_BSV, rtol=0, atol=1e-5)
        # Norms are replicated.
        assert found[3] < 0.55 * num_weights if degrees[1] == 2 else found[3] == num_weights


def errors_on_ranks(folder: Path) -> list[str]:
    """Return the errors of a mesh that inference does not support, and of no mesh."""
    errors = []
    for keys in ({"pipeline_parallel_degree": 2}, {"context_parallel_degree": 2}, None):
        try:
            if keys is None:
                load_model(folder)
            else:
                config = ParallelismConfig.model_validate(keys)
                with start_mesh(config, device=detect_device("cpu")) as mesh:
                    load_model(folder, mesh=mesh)
        except MeshError as error:
            errors.append(str(error))
    return errors


def test_meshes_without_inference_are_rejected(
    folder: Path, pools: Callable[[int], WorkerPool]
) -> None:
    for pipeline, context, none in pools(2).run(errors_on_ranks, folder):
        assert "The mesh has pipeline (2) parallelism, which inference does not" in pipeline
        assert "context (2)" in context and "Start its 2 ranks" in context
        assert "there are 2" in none


def test_a_step_of_a_run_and_its_folders_are_loaded(folder: Path, tmp_path: Path) -> None:
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "checkpoint")]) == 0
    expected = generate(load_model(folder, device="cpu"), PROMPTS, max_new_tokens=5)
    for path in (tmp_path, tmp_path / "checkpoint", tmp_path / "checkpoint" / "step-0"):
        loaded = load_model(path, device="cpu", tokenizer=folder)
        assert loaded.where == str(tmp_path / "checkpoint" / "step-0")
        assert generate(loaded, PROMPTS, max_new_tokens=5) == expected


def test_a_tokenizer_with_ids_that_have_no_embedding_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = SimpleNamespace(spec=SimpleNamespace(vocab_size=9))
    tokenizer = SimpleNamespace(vocab_size=10)
    files = SimpleNamespace(folder=tmp_path, load=lambda: tokenizer)
    monkeypatch.setattr(loaded_model, "open_weights", lambda *_, **__: weights)
    monkeypatch.setattr(loaded_model, "tokenizer_of", lambda *_: files)
    unused: Any = None
    with pytest.raises(DataError, match="has 10 tokens, but the model's vocabulary is 9"):
        loaded_model.open_model(tmp_path, unused)
    tokenizer.vocab_size = 9
    assert loaded_model.open_model(tmp_path, unused).tokenizer is tokenizer
