"""Training of adapters beside frozen weights: the same on every mesh, resumed on another one, and
exported alone or merged."""

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import tolerances
from tests.harness.hugging_face import (
    FAMILIES,
    add_tokenizer,
    has_experts,
    make_folder,
    tensors_of,
    tokens,
)
from tests.harness.jobs import Outcome, odd_config, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import EXPERT_MESHES, MESHES, assert_identical, assert_same, long
from tests.parity.test_inference import RUN, record, texts
from tests.parity.test_parity import COMPILED
from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.models import hugging_face_model, read_hugging_face_config
from torchtitan_lite.training.final_export import export_last_save

Pools = Callable[[int], WorkerPool]
LORA: dict[str, Any] = {
    "model.converters": ["lora"],
    "lora.rank": 3,
    "lora.alpha": 6.0,
    "training.local_batch_size": 2,
}
SAVING = {"checkpoint.enable": True, "checkpoint.async_mode": "disabled"}
FROZEN = {"model.router_bias_update_rate": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model.flavor": "odd"},
    "four-kv-heads": {"model.flavor": "four_kv_heads"},
    "tied": {"model.flavor": "odd_tied"},
    "experts": {"model.name": "qwen3", "model.flavor": "many_experts", **FROZEN},
    # Projections with biases.
    "gpt-oss": {"model.name": "gpt_oss", "model.flavor": "odd", **FROZEN},
    # Latent attention, shared experts and multi-token prediction.
    "deepseek": {"model.name": "deepseek_v3", "model.flavor": "odd", **FROZEN},
}
EXPLICIT = {"debug.explicit_redistribution": True}
"""An exchange that no layer asks for is an error."""
RECOMPUTED = {"activation_checkpoint.mode": "full"}
WHOLE_SEQUENCE = {"parallelism.enable_sequence_parallel": False}
FEW = {"lora.targets": ["layers.2.attention.wq"]}
"""Adapters of the last block alone: most stages, and the backward of most blocks, have none."""
EMA = {"optimizer.ema_decay": 0.7}


@pytest.fixture(scope="module")
def base(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """A model's name -> the settings of a run that trains adapters of its initial weights."""
    folder = tmp_path_factory.mktemp("base")

    @cache
    def settings(model: str, dtype: str = "float64") -> dict[str, Any]:
        run = folder / f"{model}-{dtype}"
        shared = {**MODELS[model], "training.dtype": dtype}
        once = {"training.steps": 1, "optimizer.lr": 0.0, "training.local_batch_size": 8}
        pools(1).run(run_job, run, {**shared, **SAVING, **once})
        path = str(run / "checkpoint" / "step-1")
        return {**shared, **LORA, "checkpoint.initial_load_path": path}

    return settings


@pytest.fixture(scope="module")
def reference(
    pools: Pools, base: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    """The outcome of one process, computed once."""
    folder = tmp_path_factory.mktemp("reference")

    @cache
    def run(model: str, dtype: str, overrides: str) -> Outcome:
        name = str(abs(hash((model, dtype, overrides))))
        shared = {**base(model, dtype), **json.loads(overrides)}
        return pools(1).run(run_job, folder / name, shared)[0]

    return lambda model, dtype="float64", **more: run(model, dtype, json.dumps(more))


ROWS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("dense", "pp-2", "SGD", FEW, {}),
    ("gpt-oss", "tp-2-ep-2", "SGD", {}, {}),
]
ROWS_LONG: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("dense", "fsdp-2", "AdamW", {}, RECOMPUTED),
    ("dense", "fsdp-2-tp-2", "AdamW", EMA, {}),
    ("dense", "tp-2", "SGD", {}, EXPLICIT),
    ("dense", "cp-2-allgather", "SGD", {}, {}),
    ("deepseek", "tp-2", "SGD", {}, {}),
    *(("dense", mesh, "AdamW", {}, {}) for mesh in ("tp-2", "pp-2", "cp-2-ulysses")),
    *(("dense", mesh, "SGD", {}, {}) for mesh in ("hsdp-2x2", "cpu-offload", "recompute-op")),
    *(("dense", mesh, "SGD", {}, {}) for mesh in ("pp-2-tp-2", "pp-2-cp-2", "tp-2-cp-2")),
    *(("dense", mesh, "SGD", {}, {}) for mesh in ("pp-2-zbv", "pp-2-interleaved", "pp-2-fsdp-2")),
    ("dense", "pp-2-zbv", "SGD", FEW, {}),
    ("dense", "fsdp-2", "SGD", FEW, {}),
    ("dense", "tp-2-whole-sequence", "SGD", {}, EXPLICIT),
    ("dense", "fsdp-2-tp-2", "SGD", {}, EXPLICIT),
    ("dense", "tp-2-recompute-op", "SGD", {}, {}),
    ("dense", "pp-2-tp-2-fsdp-2", "AdamW", {}, {}),
    ("four-kv-heads", "tp-4", "SGD", {}, {}),
    ("tied", "tp-2", "SGD", {}, {}),
    ("tied", "pp-2", "SGD", {}, {}),
    ("experts", "ep-2", "SGD", {}, {}),
    ("experts", "fsdp-2-tp-2-ep-4", "AdamW", {}, {}),
    ("experts", "tp-2-ep-2", "SGD", {}, WHOLE_SEQUENCE),
    ("gpt-oss", "tp-2-ep-2", "SGD", {}, WHOLE_SEQUENCE),
    ("deepseek", "tp-2", "SGD", {}, WHOLE_SEQUENCE),
    ("deepseek", "ep-2-fsdp-4", "AdamW", {}, {}),
]


@pytest.mark.parametrize(
    ("model", "mesh", "optimizer", "shared", "more"), [*ROWS, *long(*ROWS_LONG)]
)
def test_same_adapters_as_one_process(
    model: str,
    mesh: str,
    optimizer: str,
    shared: dict[str, Any],
    more: dict[str, Any],
    pools: Pools,
    base: Callable[..., dict[str, Any]],
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    world_size, overrides = {**EXPERT_MESHES, **MESHES}[mesh]
    overrides = {k: v for k, v in overrides.items() if k != "model.flavor"}
    shared = {**shared, "optimizer.name": optimizer}
    expected = reference(model, **shared)
    assert all(name.rpartition(".")[2] in ("lora_a", "lora_b") for name in expected.weights)
    assert expected.losses[-1] != expected.losses[0]
    settings = {**base(model), **overrides, **shared, **more}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", settings):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)
        assert outcome.rank > 0 or outcome.state.keys() == expected.state.keys()


@pytest.mark.matrix
def test_one_rank_casts_its_weights_as_fsdp_does(reference: Callable[..., Outcome]) -> None:
    mixed = {"training.mixed_precision_param": "bfloat16"}
    casts, copies = (
        reference("dense", "float32", **mixed, **{"training.enable_cpu_offload": offload})
        for offload in (False, True)
    )
    assert casts.losses != reference("dense", "float32").losses
    assert_identical(casts, copies)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp-2", "fsdp-2-tp-2", "fsdp-2", "pp-2"])
def test_the_first_loss_is_that_of_the_frozen_weights_bit_by_bit(
    mesh: str, pools: Pools, base: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    once = {**overrides, "training.steps": 1, "training.dtype": "float32"}
    plain = pools(world_size).run(run_job, tmp_path / "plain", once)
    adapted = pools(world_size).run(run_job, tmp_path / "run", {**base("dense", "float32"), **once})
    assert adapted[0].losses == plain[0].losses
    assert adapted[0].grad_norms != plain[0].grad_norms


@pytest.mark.parametrize("mesh", ["fsdp-2", *long("fsdp-2-tp-2", "pp-2")])
def test_same_losses_in_float32(
    mesh: str,
    pools: Pools,
    base: Callable[..., dict[str, Any]],
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    world_size, overrides = MESHES[mesh]
    expected = reference("dense", "float32", **{"optimizer.name": "SGD"})
    settings = {**base("dense", "float32"), **overrides, "optimizer.name": "SGD"}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", settings):
        losses = pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        assert outcome.losses == losses
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp-2", "fsdp-2", "fsdp-2-tp-2", "pp-2-tp-2"])
def test_same_adapters_in_compiled_blocks(
    mesh: str,
    pools: Pools,
    base: Callable[..., dict[str, Any]],
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    world_size, overrides = MESHES[mesh]
    settings = {**base("dense"), **overrides, **COMPILED, "optimizer.name": "SGD"}
    expected = reference("dense", **{"optimizer.name": "SGD"})
    outcomes = pools(world_size).run(run_job, tmp_path / "run", settings, timeout_s=280)
    for outcome in outcomes:
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


def test_a_run_resumes_on_another_mesh(
    pools: Pools,
    base: Callable[..., dict[str, Any]],
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    """Saved asynchronously on one mesh, resumed and saved on another, whose first stage has no
    adapter. The checkpoint holds adapters alone."""
    shared = {"optimizer.name": "AdamW", "lora.targets": ["layers.2.*"]}
    expected = reference("dense", **shared)
    size, overrides = MESHES["tp-2"]
    settings = {**base("dense"), **shared, "checkpoint.enable": True, "training.steps": 1}
    pools(size).run(run_job, tmp_path / "run", {**settings, **overrides})
    step = tmp_path / "run" / "checkpoint" / "step-1"
    manifest = json.loads((step / "manifest.json").read_text())
    names = {name.rpartition(".lora_")[1:] for name in manifest["tensors"]}
    assert {part for part, _ in names} == {".lora_"}
    assert {end.partition(".")[2] for _, end in names} == {"", "exp_avg", "exp_avg_sq", "step"}
    size, overrides = MESHES["pp-2"]
    for outcome in pools(size).run(
        run_job, tmp_path / "run", {**settings, **overrides, "training.steps": 2}
    ):
        assert outcome.resumed_at == 1
        assert outcome.losses == pytest.approx(expected.losses[1:], rel=tolerances.PARITY_FLOAT64)
        if outcome.rank == 0:
            assert_close(outcome.weights, expected.weights)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        difference = (found[name] - weight).abs().max().item()
        assert difference <= tolerances.PARITY_FLOAT64 * weight.abs().max().item(), name


def failure(folder: Path, settings: dict[str, Any]) -> str:
    """The error of a run in this worker."""
    try:
        run_job(folder, settings)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.matrix
def test_adapters_are_refused_on_other_weights_and_other_factors(
    pools: Pools,
    base: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, once = tmp_path / "run", {**SAVING, "training.steps": 1}
    settings = {**base("dense"), **once}
    pools(1).run(run_job, run, settings)
    adapters, weights = run / "checkpoint" / "step-1", settings["checkpoint.initial_load_path"]
    resumed = {**settings, "training.steps": 2}
    # A copy elsewhere has the same fingerprint.
    copied = shutil.copytree(weights, tmp_path / "copy" / "step-1")
    (outcome,) = pools(1).run(
        run_job, run, {**resumed, "checkpoint.initial_load_path": str(copied)}
    )
    assert outcome.resumed_at == 1
    shutil.rmtree(run / "checkpoint" / "step-2")
    other = {**MODELS["dense"], **once, "debug.seed": 1, "training.local_batch_size": 8}
    pools(1).run(run_job, tmp_path / "other", other)
    others = str(tmp_path / "other" / "checkpoint" / "step-1")
    (error,) = pools(1).run(failure, run, {**resumed, "checkpoint.initial_load_path": others})
    assert f"The saved adapters belong to the weights in {weights} (fingerprint" in error
    assert f"checkpoint.initial_load_path = {others} holds others" in error
    (error,) = pools(1).run(failure, run, {**resumed, "lora.alpha": 12.0})
    assert "were trained with a factor of 2, and [lora] gives 4. Set alpha, rank" in error
    # Adapters are no weights to start from.
    for converters in ([], ["lora"]):
        start = {"model.converters": converters, "checkpoint.initial_load_path": str(adapters)}
        whole = {"lora.rank": 8, "lora.alpha": 16.0} if not converters else {}
        (error,) = pools(1).run(failure, tmp_path / "new", {**settings, **start, **whole})
        assert f"{adapters} holds adapters alone, without the weights" in error
        assert f"torchtitan-lite convert to-hf {adapters} OUT_DIR --merge" in error
    for arguments, expected in (
        (["to-hf", str(adapters), "--base=x"], "--base is where the weights are that --merge adds"),
        (["to-hf", weights, "--merge"], f"--merge: {weights} holds no adapters, but all weights"),
        (["to-hf", str(adapters), "--merge", f"--base={others}"], f"{others} holds others"),
        (["to-dcp", str(adapters)], f"{adapters} holds adapters alone, for which torchtitan's"),
    ):
        assert main(["convert", *arguments[:2], str(tmp_path / "out"), *arguments[2:]]) == 1
        assert expected in capsys.readouterr().err


SAMPLED = {
    "validation.samples": 1,
    "validation.sample_prompt": "def ",
    "validation.sample_tokens": 6,
    "validation.sample_temperature": 0.0,
}


@pytest.mark.matrix
def test_evaluation_and_generation_merge_adapters_into_their_weights(
    pools: Pools, base: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The loss and the texts are those of the run's validation, on any mesh."""
    run = tmp_path / "run"
    settings = {**base("dense"), **RUN, **SAMPLED, "optimizer.lr": 0.05}
    pools(2).run(run_job, run, {**settings, "parallelism.tensor_parallel_degree": 2})
    events = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    (logged,) = [event["loss"] for event in events if event.get("event") == "validation"]
    (sample,) = [event["1"] for event in events if event.get("event") == "sample"]
    for size, mesh in ((1, {}), (2, {"parallelism.data_parallel_shard_degree": 2})):
        for found in pools(size).run(record, run, mesh):
            assert found["loss"] == pytest.approx(logged, rel=tolerances.PARITY_FLOAT64)
    greedy = ("--prompt=def ", "--max-new-tokens=6", "--temperature=0")
    (generated,) = pools(1).run(texts, run, {}, greedy)
    assert generated[0]["text"] == sample


PEFT_REASON = "needs peft, of requirements-dev.txt"


SHARED_EXPERTS = (
    *("deepseek", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoeshared"),
    *("hunyuan_v1_moe", "mellum", "qwen2_moe", "qwen3_next", "solar_open"),
)
FUSED = ("glm", "phi3")


def exportable_targets(family: str) -> list[str]:
    """Return the layers whose adapters PEFT can load: transformers has them as linear layers of
    their own, and PEFT 0.21 does not take them for stacked experts."""
    if family.startswith(SHARED_EXPERTS):
        return ["attention.w*"]
    return ["attention.wo", "feed_forward.w2"] if family.startswith(FUSED) else ["*"]


@pytest.mark.parametrize(
    ("family", "targets", "mesh"),
    [
        ("llama", ["*"], "fsdp-2"),
        *long(("gpt_oss", ["*"], "fsdp-2")),
        *long(("llama_tied_stretched", ["attention.w[qv]", "layers.1.feed_forward.w2"], "tp-2")),
        *long(*((family, exportable_targets(family), "tp-2") for family in FAMILIES)),
    ],
)
def test_peft_loads_exported_adapters(
    family: str, targets: list[str], mesh: str, pools: Pools, tmp_path: Path
) -> None:
    """PEFT's logits of adapters beside the folder that they were trained on are those of the merged
    export in transformers."""
    folder = add_tokenizer(make_folder(tmp_path / "base", family))
    size, overrides = MESHES[mesh]
    run = tmp_path / "run"
    settings = {
        **LORA,
        **overrides,
        **SAVING,
        "model.flavor": "hf",
        "model.name": hugging_face_model(read_hugging_face_config(folder), str(folder)).name,
        "model.hf_assets_path": str(folder),
        "checkpoint.initial_load_path": str(folder),
        "checkpoint.last_save_in_hf": True,
        "lora.targets": targets,
        "lora.use_rslora": True,
        "optimizer.lr": 0.05,
        "training.dtype": "float32",
        "training.steps": 2,
    }
    if has_experts(family):
        settings |= FROZEN
    pools(size).run(run_and_export, run, settings)
    exported, step = run / "hf" / "step-2", run / "checkpoint" / "step-2"
    config = json.loads((exported / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6.0, True)
    assert (exported / "tokenizer.json").is_file()
    alone = ["convert", "to-hf", str(step), str(tmp_path / "alone")]
    assert main(alone) == 0
    assert_equal(tensors_of(tmp_path / "alone"), tensors_of(exported))
    # The weights were moved.
    moved = shutil.move(folder, tmp_path / "moved")
    merge = ["convert", "to-hf", str(step), str(tmp_path / "merged"), "--merge"]
    assert main(merge) == 1
    assert main([*merge, f"--base={moved}"]) == 0
    with torch.no_grad():
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        expected = theirs(tokens()).logits
        before = AutoModelForCausalLM.from_pretrained(moved)(tokens()).logits
    assert (expected - before).abs().max() > 1e-2
    peft = pytest.importorskip("peft", reason=PEFT_REASON)
    with torch.no_grad(), warnings.catch_warnings():
        # PEFT's own, about names of transformers and about experts.
        warnings.simplefilter("ignore")
        plain: Any = AutoModelForCausalLM.from_pretrained(moved)
        adapted = peft.PeftModel.from_pretrained(plain, exported)
        found = adapted(tokens()).logits
    atol = tolerances.LOGITS_FLOAT32 * max(1.0, float(expected.std()))
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def run_and_export(folder: Path, settings: dict[str, Any]) -> None:
    """Train, and export as `train` does."""
    run_job(folder, settings)
    tokenizer = Path(settings["model.hf_assets_path"])
    export_last_save(odd_config(folder, settings), str(folder / "checkpoint"), tokenizer)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
