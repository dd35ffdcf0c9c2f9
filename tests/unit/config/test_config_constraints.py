"""Constraints between values: each error has its numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchtitan_lite.config import Config
from torchtitan_lite.config.resize import resize_problems
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.section import Section
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.models import auto, check_family, model_spec, qwen3
from torchtitan_lite.training.checks.constraints import check_against, check_pipeline
from torchtitan_lite.training.checks.mesh_constraints import pipeline_microbatches
from torchtitan_lite.training.run_config import load_config


@pytest.fixture
def config(tmp_path: Path):
    def config(*overrides: str) -> Config:
        path = tmp_path / "run.toml"
        path.touch()
        return load_config(path, overrides)

    return config


def config_error(config: Config, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        check_against(config, world_size)
    return str(raised.value)


def forced(config: Config, section: str, **values: object) -> Config:
    """Return the configuration with values that the schema does not support yet."""
    part: Section = getattr(config, section)
    return config.model_copy(update={section: part.model_copy(update=values)})


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_defaults_are_valid(config, world_size: int) -> None:
    check_against(config(), world_size)


def test_a_mismatched_mesh_prints_the_equation(config) -> None:
    text = config_error(config("--parallelism.data_parallel_shard_degree", "3"), 4)
    assert "data_parallel_shard (3)" in text
    assert "= 3, but there are 4 processes" in text
    assert "set data_parallel_shard_degree = 4" in text


def test_limits_of_a_registered_loss(config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("--training.loss", "mine", "--job.device", "cpu")
    assert '"mine" is not one of cross_entropy. Set experimental' in config_error(asked)
    monkeypatch.setitem(REGISTRY.losses, "mine", lambda config: None)
    check_against(asked, 1)
    more = ("--training.loss", "mine", "--training.z_loss_weight", "1e-4")
    text = config_error(config(*more, "--parallelism.pipeline_parallel_degree", "2"), 2)
    assert "does not support pipeline_parallel_degree = 2" in text and "has no z-loss" in text
    predicts = ("--model.name", "deepseek_v3", "--model.flavor", "tiny", "--model.mtp_depth", "1")
    text = config_error(config("--training.loss", "mine", *predicts))
    assert "does not support multi-token prediction" in text
    monkeypatch.setitem(auto.FLAVORS, "capped", replace(auto.FLAVORS["tiny"], logits_soft_cap=3.0))
    capped = ("--model.name", "auto", "--model.flavor", "capped")
    text = config_error(config("--training.loss", "mine", *capped))
    assert "does not support the soft cap of logits (3.0) of auto capped" in text


def test_a_mismatched_batch_prints_the_equation_and_valid_values(config) -> None:
    arguments = ["--training.local_batch_size", "8", "--training.global_batch_size", "100"]
    arguments += ["--parallelism.data_parallel_replicate_degree", "2"]
    assert config_error(config(*arguments), 4) == (
        "training.global_batch_size (100) is not a multiple of training.local_batch_size (8) x "
        "batch ranks (data_parallel_replicate 2 x data_parallel_shard 2 = 4) = 32. "
        "Set global_batch_size = 96 or 128, or local_batch_size = 5."
    )


@pytest.mark.parametrize(
    ("batch", "remedy"),
    [
        (7, "Set global_batch_size = 16."),
        (6, "Set global_batch_size = 16, or local_batch_size = 3."),
    ],
)
def test_a_batch_smaller_than_one_round(config, batch: int, remedy: str) -> None:
    arguments = ["--training.local_batch_size", "8", "--training.global_batch_size", str(batch)]
    assert remedy in config_error(config(*arguments), 2)


def test_every_stage_of_a_batch_size_warmup_must_fit_the_mesh(config) -> None:
    arguments = ["--training.local_batch_size", "2", "--training.global_batch_size", "32"]
    arguments += ["--training.batch_size_warmup", "[[100, 4], [100, 12], [100, 16]]"]
    assert config_error(config(*arguments), 4) == (
        "The configuration has 2 problems:\n"
        "  training.batch_size_warmup[0][1] (4) is not a multiple of training.local_batch_size (2) "
        "x batch ranks (data_parallel_replicate 1 x data_parallel_shard 4 = 4) = 8. "
        "Set batch_size_warmup[0][1] = 8, or local_batch_size = 1.\n"
        "  training.batch_size_warmup[1][1] (12) is not a multiple of training.local_batch_size "
        "(2) x batch ranks (data_parallel_replicate 1 x data_parallel_shard 4 = 4) = 8. "
        "Set batch_size_warmup[1][1] = 8 or 16, or local_batch_size = 1."
    )
    check_against(config(*arguments), 2)
    one = ("--training.local_batch_size=1", "--training.batch_size_warmup=[[1, 1]]")
    check_against(config("--training.global_batch_size=8", *one), 1)
    pipeline = ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=1"]
    text = config_error(
        config(
            "--training.global_batch_size=8", "--training.batch_size_warmup=[[9, 2]]", *pipeline
        ),
        4,
    )
    assert text.startswith("A step of 2 samples gives each pipeline 2 microbatches of 1")
    assert text.endswith("Set training.batch_size_warmup[0][1] = 4 or more.")


@pytest.mark.parametrize("batch", [-1, 32, 64])
def test_valid_batches(config, batch: int) -> None:
    check_against(
        config("--training.local_batch_size", "8", "--training.global_batch_size", str(batch)), 4
    )


def test_a_sequence_longer_than_the_models_maximum(config) -> None:
    arguments = ["--training.seq_len", "200000", "--validation.seq_len", "300000"]
    assert "training.seq_len (200000) is above the 131072 positions of llama3 debugmodel" in (
        config_error(config(*arguments))
    )
    arguments += ["--validation.enable", "--validation.dataset", "c4"]
    assert "validation.seq_len (300000) is above the 131072" in config_error(config(*arguments))


def test_a_sequence_length_that_context_parallel_cannot_split(config) -> None:
    uneven = forced(config("--training.seq_len", "2050"), "parallelism", context_parallel_degree=2)
    assert config_error(uneven, 2) == (
        "training.seq_len (2050) is not a multiple of context_parallel_degree (2) x pieces per "
        "rank (2) = 4. Set seq_len = 2048 or 2052."
    )
    check_against(forced(uneven, "parallelism", context_parallel_degree=1), 2)


def test_heads_that_tensor_parallel_cannot_split(config) -> None:
    uneven = forced(config(), "parallelism", tensor_parallel_degree=3)
    text = config_error(uneven, 3)
    assert "tensor_parallel_degree (3) does not divide the 16 key/value heads" in text
    assert "Degrees that do: 1, 2, 4, 8, 16." in text


def test_latent_attention_that_a_mesh_cannot_split(config) -> None:
    deepseek = config("--model.name=deepseek_v3", "--model.flavor=tiny")
    uneven = forced(deepseek, "parallelism", tensor_parallel_degree=3)
    text = config_error(uneven, 3)
    assert "tensor_parallel_degree (3) does not divide the 4 heads of deepseek_v3 tiny" in text
    assert config_error(forced(deepseek, "parallelism", tensor_parallel_degree=64), 64).count(
        "does not divide the 96 features of the shared experts"
    )
    method = {"context_parallel_rotate_method": "ulysses", "context_parallel_degree": 3}
    text = config_error(forced(deepseek, "parallelism", **method), 3)
    assert '"ulysses" splits the 4 heads that each tp rank of deepseek_v3 tiny has' in text


def test_further_predictions_need_a_family_that_has_them(config) -> None:
    text = config_error(config("--model.mtp_depth=1"))
    assert "model.mtp_depth (1): llama3 debugmodel has no multi-token prediction." in text


def test_a_pipeline_schedule_from_a_file(config, tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    arguments = ["--parallelism.pipeline_parallel_schedule_csv", str(file)]
    assert config_error(config(*arguments)) == (
        f'parallelism.pipeline_parallel_schedule_csv = "{file}" has no effect without a pipeline. '
        "Set pipeline_parallel_degree to the number of its rows, or leave it out."
    )
    arguments += ["--parallelism.pipeline_parallel_degree", "2"]
    arguments += ["--training.global_batch_size"]
    check_against(config(*arguments, "2"), 2)
    replicas = ["--fault_tolerance.enable=true", *arguments, "2"]
    assert "is for one number of microbatches, and replicas" in config_error(config(*replicas), 2)
    check_against(config("--fault_tolerance.world_size_mode=dynamic", *replicas), 2)
    assert config_error(config(*arguments, "8"), 4) == (
        "A step of 8 samples gives each pipeline 4 microbatches of 1 (over 2 batch ranks), but "
        f'parallelism.pipeline_parallel_schedule_csv = "{file}" runs 2. '
        "Set training.global_batch_size = 4."
    )
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1X1\n")
    assert f'{file}": row 2, column 4: "1X1" is not an action' in config_error(
        config(*arguments, "2"), 2
    )
    file.unlink()
    assert f'_csv = "{file}": does not exist.' in config_error(config(*arguments, "2"), 2)


def test_a_pipeline_is_checked_without_data_and_devices(config, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--job.device", "cuda", "--training.dataset_path", "/no/x"]
    arguments += ["--parallelism.pipeline_parallel_degree", "2"]
    check_pipeline(config(*arguments), 2)
    with pytest.raises(ConfigError, match="The configuration has 2 problems"):
        check_pipeline(config(*arguments, "--model.flavor", "none such"), 3)


def test_unknown_model_and_flavor(config) -> None:
    assert 'model.name = "lama3" is not one of' in config_error(config("--model.name", "lama3"))
    assert 'Did you mean "debugmodel"?' in config_error(config("--model.flavor", "debugmodell"))


@pytest.mark.parametrize(
    "arguments", [["--model.attention_backend", "flex"], ["--model.flavor", "debugmodel_flex_attn"]]
)
def test_flex_attention_needs_a_gpu(config, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = config_error(config(*arguments))
    assert "needs a GPU, but there is none" in text
    assert 'Set model.attention_backend = "sdpa"' in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_against(config(*arguments), 1)
    assert 'but job.device is "cpu"' in config_error(config(*arguments, "--job.device", "cpu"))


def test_ring_attention_is_not_compiled(config) -> None:
    ring = ["--parallelism.context_parallel_rotate_method", "alltoall"]
    ring += ["--parallelism.context_parallel_degree", "2", "--model.attention_mask", "causal"]
    ring += ["--compile.enable", "true"]
    assert '"alltoall" (ring attention) cannot be compiled. Use' in config_error(config(*ring), 2)
    check_against(config(*ring, "--compile.components", '["loss"]'), 2)


def test_ring_attention_computes_in_bfloat16_on_a_gpu(config, monkeypatch) -> None:
    monkeypatch.setattr(
        "torchtitan_lite.training.checks.mesh_constraints.on_gpu", lambda config: True
    )
    ring = ["--parallelism.context_parallel_rotate_method", "alltoall"]
    ring += ["--parallelism.context_parallel_degree", "2", "--model.attention_mask", "causal"]
    float32 = ["--training.mixed_precision_param", "float32"]
    text = config_error(config(*ring, *float32), 2)
    assert "(ring attention) computes in bfloat16 on a GPU, but training.mixed_precision" in text
    monkeypatch.setattr(
        "torchtitan_lite.training.checks.mesh_constraints.on_gpu", lambda config: False
    )
    check_against(config(*ring, *float32), 2)


def test_a_traced_step_runs_without_flex_attention(config, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ["--model.attention_backend", "flex", "--debug.trace_communication", "true"]
    assert "would run FlexAttention without its compiled kernel" in config_error(config(*arguments))


def test_a_missing_gpu(config, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert 'job.device = "cuda", but there is no GPU' in config_error(
        config("--job.device", "cuda")
    )


def test_held_out_documents_of_a_stream_are_not_known(config, monkeypatch) -> None:
    options = ["--validation.enable", "--training.held_out_fraction", "0.01"]
    text = config_error(config(*options, "--training.streaming"))
    assert "training.streaming = true, and its held-out documents are not known" in text
    monkeypatch.setitem(REGISTRY.online_datasets, "mine", lambda path: None)
    text = config_error(config(*options, "--training.dataset", "mine"))
    assert 'training.dataset = "mine" is an online data set, and its held-out documents' in text
    separate = ["--training.streaming", "--validation.dataset", "c4_validation"]
    check_against(config(*options, *separate), 1)


@pytest.mark.parametrize("held", [0, 1])
def test_a_folder_must_have_the_layers_of_multi_token_prediction(
    config, tmp_path: Path, held: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = {f"model.layers.{n}.input_layernorm.weight": torch.ones(8) for n in range(4)}
    spec = model_spec(ModelConfig(name="deepseek_v3", flavor="tiny", mtp_depth=2))
    first, second = spec.prediction_units
    if held:
        weights[f"model.{first}.enorm.weight"] = torch.ones(8)
    weights = {key: one for key, one in weights.items() if f".{second}." not in key}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = ["--model.name=deepseek_v3", "--model.flavor=tiny", "--checkpoint.enable"]
    options += [f"--checkpoint.initial_load_path={folder}"]
    text = config_error(config(*options, "--model.mtp_depth=2"))
    assert f'model.mtp_depth = 2, but checkpoint.initial_load_path = "{folder}" has' in text
    assert f"model.{second}). Set model.mtp_depth = {held}." in text
    check_against(config(*options, f"--model.mtp_depth={held}"), 1)


def test_validation_needs_data(config) -> None:
    assert "there is nothing to validate on" in config_error(config("--validation.enable"))
    check_against(config("--validation.enable", "--training.held_out_fraction", "0.01"), 1)
    check_against(config("--validation.enable", "--validation.dataset", "c4_validation"), 1)


def test_conversations_need_a_chat_data_set(config, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").touch()
    chat = f"--training.dataset_path={tmp_path / 'chat.jsonl'}"
    options = "--training.messages_column=messages"
    check_against(config(chat, options), 1)
    text = config_error(config(options, "--validation.messages_column=messages"))
    assert (
        'training.messages_column = "messages" needs conversations, and dataset = "python_' in text
    )
    assert (
        'validation.messages_column = "messages" needs conversations. Set validation.data' in text
    )
    text = config_error(
        config(chat, options, "--training.streaming=true", "--training.text_column=body")
    )
    assert 'training.text_column = "body": a corpus holds either conversations or texts' in text
    assert "training.streaming = true: conversations are tokenized before the first step" in text


def test_keys_of_muon_need_muon(config) -> None:
    keys = ("--optimizer.adamw_lr", "1e-3", "--optimizer.muon_ns_steps", "6")
    assert config_error(config(*keys)) == (
        "optimizer.adamw_lr = 0.001 and optimizer.muon_ns_steps = 6 have no effect while "
        'optimizer.name = "AdamW". Set optimizer.name = "Muon", or leave them out.'
    )
    check_against(config("--optimizer.name", "Muon", *keys), 1)
    assert config_error(config("--optimizer.name", "Muon", *keys, "--optimizer.lr", "0")) == (
        "optimizer.adamw_lr = 0.001 follows the schedule of optimizer.lr, which is 0. Set lr above "
        "0, or leave adamw_lr out."
    )


def test_samples_need_validation_and_existing_weights(config, monkeypatch) -> None:
    assert config_error(config("--validation.samples", "2")) == (
        "validation.samples = 2 has no effect while validation.enable is false. Set "
        "validation.enable = true, or samples = 0."
    )
    options = ["--validation.enable", "--training.held_out_fraction", "0.01"]
    options += ["--validation.samples", "1", "--training.enable_cpu_offload"]
    check_against(config(*options), 1)
    monkeypatch.setattr(
        "torchtitan_lite.training.checks.data_constraints.on_gpu", lambda config: True
    )
    text = config_error(config(*options))
    assert "validation.samples = 1 needs the weights on the GPU" in text
    assert "training.enable_cpu_offload = true" in text


def test_loading_with_checkpoints_disabled(config, tmp_path: Path) -> None:
    arguments = ["--checkpoint.load_step", "5", "--checkpoint.initial_load_path", str(tmp_path)]
    text = config_error(config(*arguments))
    assert "checkpoint.load_step = 5 and checkpoint.initial_load_path" in text
    assert "have no effect while checkpoint.enable is false" in text
    check_against(config(*arguments, "--checkpoint.enable"), 1)
    check_against(config(*arguments, "--checkpoint.load_only"), 1)
    text = config_error(config("--checkpoint.load_step", "0"))
    assert "checkpoint.load_step = 0 has no effect" in text or "load_step = 0 have" in text


def test_an_export_at_the_end_needs_a_checkpoint_that_transformers_can_read(config) -> None:
    options = "--checkpoint.last_save_in_hf"
    assert "exports the last checkpoint, and none is saved" in config_error(config(options))
    check_against(config(options, "--checkpoint.enable"), 1)
    experts = ["--model.name", "qwen3", "--model.flavor", "tiny_moe", "--checkpoint.enable"]
    check_against(config(options, *experts), 1)
    text = config_error(config(options, *experts, "--model.router_bias_update_rate", "0.01"))
    assert "router_bias_update_rate = 0.01) has no place in a Hugging Face folder" in text


def test_locations_are_paths_or_whole_urls(config) -> None:
    wrong = ["--checkpoint.folder", "s3:bucket/run", "--job.dump_folder", "s3://bucket/run"]
    text = config_error(config(*wrong, "--training.dataset_path", "gs:/texts"))
    assert 'checkpoint.folder: "s3:bucket/run" is not a URL: write s3://bucket/run, or' in text
    assert 'job.dump_folder = "s3://bucket/run" is a URL, and logs' in text
    assert 'training.dataset_path: "gs:/texts" is not a URL' in text
    wrong = ["--checkpoint.folder", "sqlite:/tmp/x.db", "--job.dump_folder", "runs:/a"]
    wrong += ["--checkpoint.enable", "--checkpoint.initial_load_path", "sqlite:/x"]
    text = config_error(config(*wrong))
    assert 'checkpoint.folder: "sqlite:/tmp/x.db" is not a URL: write ./sqlite:/tmp/x.db' in text
    assert 'job.dump_folder: "runs:/a" is not a URL: write ./runs:/a for a folder' in text
    assert 'checkpoint.initial_load_path: "sqlite:/x" is not a URL' in text
    text = config_error(config("--job.dump_folder", "s3:bucket/run"))
    assert 'job.dump_folder: "s3:bucket/run" is not a URL: write s3://bucket/run' in text


def test_missing_files_are_all_named(config, tmp_path: Path) -> None:
    (tmp_path / "there.txt").touch()
    arguments = ["--model.hf_assets_path", "no/assets", "--checkpoint.enable"]
    arguments += ["--checkpoint.initial_load_path", "no/checkpoint"]
    arguments += ["--validation.dataset_path", "no/validation"]
    arguments += [
        "--training.corpora",
        f'[{{dataset_path = "no/*.json"}}, {{dataset_path = "{tmp_path}/*.txt"}}]',
    ]
    text = config_error(config(*arguments))
    assert text.startswith("The configuration has 4 problems:")
    assert f'model.hf_assets_path = "no/assets": does not exist below {Path.cwd()}.' in text
    assert 'training.corpora[0].dataset_path = "no/*.json": does not exist' in text
    assert 'validation.dataset_path = "no/validation"' in text
    assert 'checkpoint.initial_load_path = "no/checkpoint"' in text
    assert 'training.dataset_path = "/no/x"' in config_error(
        config("--training.dataset_path", "/no/x")
    )


def test_offloading_to_the_cpu_needs_no_gpu(config) -> None:
    check_against(config("--training.enable_cpu_offload"), 1)


def test_all_problems_at_once(config) -> None:
    arguments = ["--training.global_batch_size", "7", "--validation.enable"]
    arguments += ["--training.seq_len", "999999", "--model.hf_assets_path", "nowhere"]
    assert config_error(config(*arguments), 2).startswith("The configuration has 4 problems:")


@pytest.mark.parametrize(
    ("degree", "flavor", "expected"),
    [
        (
            "expert_parallel_degree",
            "tiny_moe",
            "parallelism.expert_parallel_degree (3) does not divide the 8 experts of qwen3 "
            "tiny_moe. Degrees that do: 1, 2, 4, 8.",
        ),
        (
            "expert_tensor_parallel_degree",
            "tiny",
            "parallelism.expert_tensor_parallel_degree (3): qwen3 tiny has no experts. Set "
            "it to 1, or choose a flavor with experts (MoE).",
        ),
    ],
)
def test_a_number_of_experts_that_cannot_be_split_is_rejected(
    config, degree: str, flavor: str, expected: str
) -> None:
    arguments = ["--model.name", "qwen3", "--model.flavor", flavor, f"--parallelism.{degree}", "3"]
    arguments += ["--training.global_batch_size", "24"]
    assert config_error(config(*arguments), 3) == expected


@pytest.mark.parametrize("name", ["bias_update_rate", "balance_loss_weight", "z_loss_weight"])
def test_settings_of_routers_need_routers(config, name: str) -> None:
    text = config_error(config(f"--model.router_{name}", "0.01"))
    assert f"model.router_{name} (0.01): llama3 debugmodel has no experts" in text
    deepseek = ["--model.name=deepseek_v3", "--model.flavor=tiny", f"--model.router_{name}=0.25"]
    assert getattr(model_spec(config(*deepseek).model).dims.moe, name) == 0.25


def test_async_tensor_parallelism_lists_its_requirements(config) -> None:
    text = config_error(config("--parallelism.enable_async_tensor_parallel", "true"))
    assert text == (
        "parallelism.enable_async_tensor_parallel = true needs tensor_parallel_degree above 1, and "
        'compile.enable = true with "model" among compile.components, and GPUs that reach each '
        "other's memory (CUDA symmetric memory). Set it to false."
    )


FLOAT8 = ["--model.converters", "quantize.linear.float8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU may compute in float8")
def test_float8_without_a_gpu_is_rejected(config) -> None:
    assert config_error(config(*FLOAT8)) == (
        'model.converters = ["quantize.linear.float8"]: there is no GPU to compute in float8. Set '
        "model.converters = [], or emulate = true, which is slow and for tests."
    )


def test_float8_is_rejected_for_shapes_that_tensor_parallelism_splits(config) -> None:
    emulated = [*FLOAT8, "--quantize.linear.float8.emulate", "true"]
    check_against(config(*emulated), 1)
    text = config_error(config(*emulated, "--parallelism.tensor_parallel_degree", "2"), 2)
    assert "do not support tensor parallelism. Set tensor_parallel_degree = 1 (given: 2)." in text


def test_float8_without_torchao_is_rejected(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lite.core.optional_dependencies.find_spec", lambda name: None)
    assert "Run pip install torchao, or install torchtitan_lite with the extra" in config_error(
        config(*FLOAT8)
    )


LORA = ["--model.converters", "lora"]


def test_adapters_need_weights_to_start_from(config, tmp_path: Path) -> None:
    assert config_error(config(*LORA)) == (
        'model.converters = ["lora"] trains adapters of given weights, and there are none. Set '
        "checkpoint.initial_load_path to a Hugging Face folder or a checkpoint."
    )
    check_against(config(*LORA, f"--checkpoint.initial_load_path={tmp_path}"), 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--optimizer.name=Muon"], 'Set optimizer.name = "AdamW"'),
        (
            ["--model.name=deepseek_v3", "--model.router_bias_update_rate=0.001"],
            "Set model.router_bias_update_rate = 0",
        ),
        (["--fault_tolerance.semi_sync_method=diloco"], "Leave semi_sync_method out"),
        (["--checkpoint.initial_load_model_only=false"], "Set checkpoint.initial_load_model_only"),
        (['--model.converters=["lora", "quantize.linear.float8"]'], "Choose one of the two"),
        (['--lora.targets=["q_proj"]'], 'lora.targets: "q_proj" matches no linear layer'),
    ],
)
def test_what_adapters_do_not_support_is_rejected(
    config, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    start = f"--checkpoint.initial_load_path={tmp_path}"
    assert expected in config_error(config(*LORA, start, *arguments))


def test_settings_of_adapters_without_the_converter_are_rejected(config) -> None:
    assert config_error(config("--lora.rank=4", "--lora.use_rslora=true")) == (
        'lora.rank = 4 and lora.use_rslora = true have no effect without "lora" in '
        "model.converters. Add it, or omit the table [lora]."
    )


def test_a_wait_for_subscribers_ends_before_collectives_do(config) -> None:
    waits = ["--publish.enable=true", "--publish.when_in_use=wait", "--publish.max_wait_s=100"]
    assert "others wait for it, at most comm.train_timeout_seconds = 100" in config_error(
        config(*waits)
    )
    check_against(config(*waits, "--comm.train_timeout_seconds=101"), 1)
    check_against(config(*waits, "--publish.when_in_use=skip"), 1)


def test_deltas_need_an_address(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "0123456789abcdef")
    deltas = ["--publish.enable=true", "--publish.deltas=true"]
    assert "publish.deltas = true has no effect without publish.address" in config_error(
        config(*deltas)
    )
    check_against(config(*deltas, "--publish.address=127.0.0.1"), 1)


def test_unsupported_numbers_of_microbatches_are_rejected_with_the_nearest_batch(config) -> None:
    arguments = ["--parallelism.pipeline_parallel_degree", "2"]
    arguments += ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
    text = config_error(config(*arguments, "--training.global_batch_size", "9"), 2)
    assert "gives each pipeline 9 microbatches of 1 (over 1 batch ranks)." in text
    assert text.endswith("Set global_batch_size = 10.")
    check_against(config(*arguments, "--training.global_batch_size", "10"), 2)


def test_unsupported_context_parallel_options_are_rejected_at_the_start(config) -> None:
    two = ["--parallelism.context_parallel_degree", "2"]
    ring = [*two, "--parallelism.context_parallel_rotate_method", "alltoall"]
    assert "cannot keep attention within documents" in config_error(
        config(*ring, "--model.attention_mask", "document"), 2
    )
    check_against(config(*ring, "--model.attention_mask", "causal"), 2)
    balanced = [*two, "--parallelism.context_parallel_load_balancer", "ptrr"]
    assert '"ptrr" is not supported' in config_error(config(*balanced), 2)
    three = ["--parallelism.context_parallel_degree", "3", "--training.seq_len", "768"]
    ulysses = [*three, "--parallelism.context_parallel_rotate_method", "ulysses"]
    text = config_error(config(*ulysses), 3)
    assert "splits the 16 heads" in text and "do: 1, 2, 4, 8, 16; or use" in text


def test_tied_weights_need_a_sharded_output(config) -> None:
    arguments = ["--model.flavor", "1B", "--parallelism.tensor_parallel_degree", "2"]
    arguments += ["--parallelism.disable_loss_parallel", "true"]
    assert "the output of llama3 1B is its embedding" in config_error(config(*arguments), 2)


def test_a_replica_waits_for_the_missing_ones_before_it_ends(config) -> None:
    arguments = ["--fault_tolerance.enable=true", "--fault_tolerance.quorum_timeout_s=60"]
    assert "join_timeout_s (60) is not below quorum_timeout_s (60)" in config_error(
        config(*arguments)
    )
    check_against(config(*arguments, "--fault_tolerance.join_timeout_s=30"), 1)


def test_a_secret_of_replicas_is_checked_before_they_start(
    config, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable = "--fault_tolerance.enable=true"
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "...")
    assert "TORCHTITAN_LITE_TOKEN has 3 characters of at least 16" in config_error(config(enable))
    check_against(config(), 1)
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "")
    assert "TORCHTITAN_LITE_TOKEN" in config_error(config(enable))
    monkeypatch.delenv("TORCHTITAN_LITE_TOKEN")
    check_against(config(enable), 1)


_SEMI_SYNC = (
    "--fault_tolerance.enable=true",
    "--fault_tolerance.sync_steps=10",
    "--training.steps=100",
)


@pytest.mark.parametrize("method", ["local_sgd", "diloco", "streaming_diloco"])
def test_semi_synchronous_training_with_supported_features(config, method: str) -> None:
    options = (*_SEMI_SYNC, f"--fault_tolerance.semi_sync_method={method}")
    check_against(config(*options), 1)
    # A round of the local batch for each replica.
    shares = ("--fault_tolerance.group_size=8", "--training.local_batch_size=2")
    check_against(config(*options, *shares, "--training.global_batch_size=16"), 1)


@pytest.mark.parametrize(
    ("method", "overrides", "problem"),
    [
        ("diloco", ["--fault_tolerance.enable=false"], "Set fault_tolerance.enable = true"),
        ("diloco", ["--anomalies.on_spike=roll_back"], "is incompatible with"),
        (
            "diloco",
            ["--fault_tolerance.group_size=999", "--training.global_batch_size=64"],
            "gives each replica some of every step",
        ),
        (
            "diloco",
            [
                *("--fault_tolerance.group_size=2", "--training.local_batch_size=4"),
                *("--training.global_batch_size=16", "--training.batch_size_warmup=[[99, 4]]"),
            ],
            "training.batch_size_warmup[0][1] (4) has 1 rounds of local_batch_size",
        ),
        ("diloco", ["--fault_tolerance.replay_check=true"], "Set it to false"),
        ("local_sgd", ["--fault_tolerance.state_check=true"], "Set it to false"),
        ("diloco", ["--training.steps=105"], "training.steps (105) is not a multiple of 10"),
        (
            "local_sgd",
            ["--checkpoint.enable=true", "--checkpoint.interval=25"],
            "checkpoint.interval (25) is not a multiple of 10",
        ),
        ("diloco", ["--fault_tolerance.num_fragments=2"], "num_fragments = 2 has no effect"),
        (
            "diloco",
            ["--fault_tolerance.world_size_mode=fixed_with_spares"],
            "has no spares",
        ),
        ("diloco", ["--model.router_bias_update_rate=1e-3"], "biases of routers"),
        (
            "streaming_diloco",
            ["--fault_tolerance.num_fragments=3"],
            "sync_steps (10) is not a multiple of num_fragments (3). Set it to 12",
        ),
        (
            "streaming_diloco",
            ["--fault_tolerance.num_fragments=5", "--fault_tolerance.fragment_sync_delay=2"],
            "must be below the 2 steps",
        ),
    ],
)
def test_features_without_semi_synchronous_support_are_rejected(
    config, method: str, overrides: list[str], problem: str
) -> None:
    options = f"--fault_tolerance.semi_sync_method={method}"
    assert problem in config_error(config(*_SEMI_SYNC, options, *overrides))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_quantized_averaging_needs_a_gpu(config) -> None:
    options = [
        "--fault_tolerance.semi_sync_method=diloco",
        "--fault_tolerance.should_quantize=true",
    ]
    assert "should_quantize = true needs a GPU" in config_error(config(*_SEMI_SYNC, *options))


def test_an_unwritable_dump_folder_is_rejected(config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = config_error(config("--job.dump_folder", str(tmp_path / "file" / "run")))
    assert "cannot be written" in text and f"{tmp_path / 'file'} is not a folder" in text
    check_against(config("--job.dump_folder", str(tmp_path / "new" / "run")), 1)


def test_buddy_copies_need_snapshots_and_no_replicas(config) -> None:
    check_against(config("--checkpoint.enable", "--checkpoint.buddy_interval", "5"), 2)
    copies = ["--checkpoint.buddy_interval", "5"]
    assert "checkpoint.buddy_interval = 5 copies snapshots, and this run takes none" in (
        config_error(config(*copies))
    )
    synchronous = ["--checkpoint.enable", "--checkpoint.async_mode", "disabled"]
    assert "copies snapshots, and this run takes none" in config_error(
        config(*synchronous, *copies)
    )
    replicas = ["--checkpoint.enable", "--fault_tolerance.enable", "true"]
    assert "the other replicas already hold the state" in config_error(config(*replicas, *copies))


def test_sequence_parallelism_splits_sequences_too(config) -> None:
    uneven = ["--training.seq_len", "2051", "--parallelism.tensor_parallel_degree", "4"]
    assert config_error(config(*uneven), 4) == (
        "training.seq_len (2051) is not a multiple of tensor_parallel_degree (sequence "
        "parallelism) (4) = 4. Set seq_len = 2048 or 2052."
    )
    check_against(config(*uneven, "--parallelism.enable_sequence_parallel", "false"), 4)
    both = ["--training.seq_len", "2052", *uneven[2:], "--parallelism.context_parallel_degree=3"]
    assert "(3) x pieces per rank (2) x tensor_parallel_degree (sequence parallelism) (4) = 24" in (
        config_error(config(*both), 12)
    )


def test_ulysses_splits_the_heads_of_a_tensor_parallel_rank(config) -> None:
    method = ["--parallelism.context_parallel_rotate_method", "ulysses"]
    method += ["--parallelism.tensor_parallel_degree", "4", "--training.seq_len", "2048"]
    check_against(config(*method, "--parallelism.context_parallel_degree", "4"), 16)
    two = ["--parallelism.tensor_parallel_degree=2", "--parallelism.context_parallel_degree=8"]
    check_against(config(*method, *two), 16)
    text = config_error(config(*method, "--parallelism.context_parallel_degree", "8"), 32)
    assert (
        '"ulysses" splits the 4 heads that each tp rank of llama3 debugmodel has over '
        "context_parallel_degree (8) ranks, which does not divide them. Degrees that do: 1, 2, 4;"
    ) in text


def test_a_piece_of_a_sequence_is_as_long_as_the_convolutions(config) -> None:
    recurrent = ["--model.name=qwen3_next", "--model.flavor=tiny"]
    recurrent += ["--training.seq_len=16", "--parallelism.tensor_parallel_degree=1"]
    recurrent += ["--parallelism.context_parallel_degree"]
    text = config_error(config(*recurrent, "4"), 4)
    assert "leaves 2 positions for each of the 8 pieces" in text and "degree (4) ranks" in text
    check_against(config(*recurrent, "2"), 2)


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"context_parallel_degree": 2}, "cp"),
        ({"tensor_parallel_degree": 2}, "tp"),
        ({"context_parallel_degree": 2, "tensor_parallel_degree": 2}, "cp and tp"),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": "false"}, ""),
    ],
)
def test_a_capacity_needs_whole_sequences(config, options: dict[str, Any], axes: str) -> None:
    dims = qwen3.FLAVORS["tiny_moe"]
    assert dims.moe is not None
    qwen3.FLAVORS["capped"] = replace(dims, moe=replace(dims.moe, capacity_factor=1.0))
    chosen = config(
        "--model.name=qwen3",
        "--model.flavor=capped",
        *(f"--parallelism.{key}={value}" for key, value in options.items()),
    )
    world_size = math.prod(value for value in options.values() if isinstance(value, int))
    if axes:
        assert f"the ranks of {axes} have only parts" in config_error(chosen, world_size)
    else:
        check_against(chosen, world_size)


def test_the_batch_ranks_divide_the_microbatches_of_a_pipeline(config) -> None:
    chosen = config(
        "--training.global_batch_size=48", "--parallelism.pipeline_parallel_microbatch_size=4"
    )
    assert pipeline_microbatches(chosen, ParallelDims(pp=2, dp_replicate=2, dp_shard=3)) == 2


def test_an_unknown_family_is_named_alone() -> None:
    """Other problems depend on the model."""
    config = Config(
        model=ModelConfig(name="lama3"), parallelism=ParallelismConfig(tensor_parallel_degree=7)
    )
    with pytest.raises(ConfigError) as alone:
        check_family(config.model)
    with pytest.raises(ConfigError) as caught:
        check_against(config, 2)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize(("load_step", "is_problem"), [("-1", False), ("0", True), ("3", True)])
def test_a_run_that_changes_its_ranks_resumes_the_newest_state(
    config, load_step: str, is_problem: bool
) -> None:
    resumed = config(
        "--checkpoint.enable",
        "--training.global_batch_size=8",
        f"--checkpoint.load_step={load_step}",
    )
    problems = list(resize_problems(resumed, "a resize"))
    assert ["load_step" in problem for problem in problems] == [True] * is_problem
