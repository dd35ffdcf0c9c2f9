"""The schema compared with torchtitan 0.2.2: every key, every default, the sizes of every flavor,
and the lines that a run with one of its files logs. The asset has the contents of its configuration
dataclasses."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import Config
from torchtitan_lite.config.keys import all_keys, type_at, value_text, without_effect
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.config.toml_file import read_toml
from torchtitan_lite.config.torchtitan_keys import (
    DEFAULTS,
    KEYS,
    ROUTER_BIAS_UPDATE_RATE,
    VERSION,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.models import model_spec
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import RopeScaling
from torchtitan_lite.training.checks.torchtitan_file import (
    differing_defaults,
    is_torchtitan_file,
    log_about_keys,
)
from torchtitan_lite.training.run_config import config_from, load_config

TORCHTITAN = json.loads(Path("tests/assets/torchtitan_defaults.json").read_text())
THEIRS: dict[str, Any] = TORCHTITAN["config"] | TORCHTITAN["components.ft.config"]
NOT_HERE = {"job.config_file", "model.tokenizer_path"}
"""The first is a command-line option, the second a former name."""
FREE_FORM = ("quantize.linear.mx.", "quantize.grouped_mm.")
"""Tables that are accepted with any contents."""


def test_every_key_of_torchtitan_is_in_the_table_of_keys() -> None:
    assert TORCHTITAN["version"] == VERSION
    ours = {f"{table}.{key}" for table, keys in KEYS.items() for key in keys.split()}
    assert ours == set(THEIRS)


def test_the_table_of_defaults_is_complete() -> None:
    ours = all_keys(Config)
    missing = {key for key in THEIRS if key not in ours and not key.startswith(FREE_FORM)}
    assert missing == NOT_HERE
    differing = {
        key: default
        for key, default in THEIRS.items()
        if key in ours and (ours[key].default, type(ours[key].default)) != (default, type(default))
    }
    assert differing == DEFAULTS


def test_the_page_for_users_of_torchtitan_lists_every_difference() -> None:
    page = Path("docs/from_torchtitan.md").read_text()
    ours = all_keys(Config)
    for key, theirs in DEFAULTS.items():
        row = f"| `{key}` | `{value_text(theirs)}` | `{value_text(ours[key].default)}` | "
        assert row in page
    # Every key that the page names exists on one of both sides.
    tables = "|".join(sorted(Config.model_fields))
    named = set(re.findall(rf"`((?:{tables})\.[a-z0-9_.]+)`", page))
    assert [
        name
        for name in sorted(named - set(THEIRS))
        if type_at(Config, tuple(name.split("."))) is None
    ] == []


def _sizes_of_llama3(args: dict[str, Any]) -> dict[str, Any]:
    multiple = args["multiple_of"]
    hidden = int(int(2 * 4 * args["dim"] / 3) * (args["ffn_dim_multiplier"] or 1))
    scaling = args["rope_scaling_args"]
    return {
        "num_kv_heads": args["n_kv_heads"] or args["n_heads"],
        "hidden_dim": -(-hidden // multiple) * multiple,
        "rope_scaling": RopeScaling(
            factor=scaling["scaling_factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position=scaling["original_max_position_embeddings"],
        ),
    }


def _sizes_of_qwen3(args: dict[str, Any]) -> dict[str, Any]:
    moe, experts = None, args.get("moe_args")
    if experts is not None:
        assert experts["load_balance_coeff"] == ROUTER_BIAS_UPDATE_RATE
        assert (experts["num_shared_experts"], experts["score_func"]) == (0, "softmax")
        moe = MoEDims(
            num_experts=experts["num_experts"],
            top_k=experts["top_k"],
            hidden_dim=args["moe_inter_dim"],
            normalize_weights=experts["route_norm"],
            route_scale=experts["route_scale"],
        )
    return {
        "num_kv_heads": args["n_kv_heads"],
        "head_dim": args["head_dim"],
        "hidden_dim": args["hidden_dim"] if moe is None else None,
        "tied_embeddings": args["enable_weight_tying"],
        "moe": moe,
    }


def _sizes_of_deepseek_v3(args: dict[str, Any]) -> dict[str, Any]:
    experts = args["moe_args"]
    assert experts["load_balance_coeff"] == ROUTER_BIAS_UPDATE_RATE
    names = {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    return {
        **{name: args[name] for name in names},
        "q_lora_rank": args["q_lora_rank"] or None,
        "hidden_dim": args["inter_dim"],
        "num_dense_layers": args["n_dense_layers"],
        "moe": {
            "num_experts": experts["num_experts"],
            "top_k": experts["top_k"],
            "hidden_dim": args["moe_inter_dim"],
            "shared_hidden_dim": args["moe_inter_dim"] * experts["num_shared_experts"],
            "score": experts["score_func"],
            "normalize_weights": experts["route_norm"],
            "route_scale": experts["route_scale"],
            "num_groups": experts["num_expert_groups"] or 1,
            "top_groups": experts["num_limited_groups"] or 1,
        },
    }


@pytest.mark.parametrize("flavor", TORCHTITAN["models"]["deepseek_v3"])
def test_deepseek_flavors_have_the_sizes_of_torchtitan(flavor: str) -> None:
    args = TORCHTITAN["models"]["deepseek_v3"][flavor]
    theirs = {
        "dim": args["dim"],
        "num_layers": args["n_layers"],
        "num_heads": args["n_heads"],
        "vocab_size": args["vocab_size"],
        "rope_theta": args["rope_theta"],
    } | _sizes_of_deepseek_v3(args)
    own = asdict(model_spec(ModelConfig(name="deepseek_v3", flavor=flavor)).dims)
    moe = theirs.pop("moe")
    assert {key: own[key] for key in theirs} == theirs
    assert {key: own["moe"][key] for key in moe} == moe


@pytest.mark.parametrize(
    ("family", "flavor"),
    [(family, flavor) for family in ("llama3", "qwen3") for flavor in TORCHTITAN["models"][family]],
)
def test_flavors_have_the_sizes_of_torchtitan(family: str, flavor: str) -> None:
    args = TORCHTITAN["models"][family][flavor]
    theirs = {
        "dim": args["dim"],
        "num_layers": args["n_layers"],
        "num_heads": args["n_heads"],
        "vocab_size": args["vocab_size"],
        "norm_eps": args["norm_eps"],
        "rope_theta": args["rope_theta"],
        # varlen: the kernel skips other documents; here the mask hides them.
        "attention_backend": "sdpa" if args["attn_type"] == "varlen" else args["attn_type"],
        "document_mask": args["attn_mask_type"] == "block_causal",
    } | (_sizes_of_llama3(args) if family == "llama3" else _sizes_of_qwen3(args))
    own = model_spec(ModelConfig(name=family, flavor=flavor)).dims
    assert {key: getattr(own, key) for key in theirs} == theirs


FLOAT8 = {"quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": False}}}}
"""In most files that torchtitan ships."""


def lines(tables: dict[str, Any], *overrides: str) -> list[str]:
    # Without a GPU on any machine.
    config = config_from(tables, "FILE", ["--job.device=cpu", *overrides])
    return list(differing_defaults(config).values())


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.toml")), ids=lambda file: file.stem)
def test_shipped_files_are_not_recognized_as_torchtitan_files(file: Path) -> None:
    load_config(file)
    assert not is_torchtitan_file(read_toml(file))


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, False),
        ({"model": {}}, False),
        # What both know does not tell where a file comes from.
        ({"training": {"steps": 10}}, False),
        ({"fault_tolerance": {"sync_steps": 10}}, False),
        ({"training": {"steps": 10, "gc_freq": 50}, "metrics": {"log_freq": 1}}, False),
        ({"quantize": {"linear": {"mx": {"recipe_name": "mxfp8_cublas"}}}}, True),
        (FLOAT8, True),
        ({"validation": {"dataloader": {"num_workers": 2}}}, True),
        ({"debug": {"moe_force_load_balance": False}}, True),
        ({"job": {"custom_config_module": "torchtitan.components.ft.config"}}, True),
        ({"job": {"custom_config_module": "my_package.config"}}, False),
        (FLOAT8 | {"training": {"steps": 10, "streaming": False}}, False),
        ({"training": {"steps": 10}, "anomalies": {"on_spike": "off"}}, False),
        ({"training": {"corpora": [{"dataset": "c4"}]}}, False),
    ],
)
def test_a_file_of_torchtitan_has_its_keys_alone(tables: dict[str, Any], expected: bool) -> None:
    assert is_torchtitan_file(tables) is expected


def test_each_differing_default_is_one_line_with_its_remedy() -> None:
    tables = {
        "training": {"seq_len": 4096},
        "validation": {"enable": True},
        "fault_tolerance": {"enable": True},
    }
    actual = lines(tables)
    assert actual == [
        "model.hf_assets_path is not set: torchtitan 0.2.2 reads the tokenizer in "
        '"./tests/assets/tokenizer", this run trains a tokenizer on its corpus. For torchtitan\'s, '
        "set it to that folder.",
        'training.dataset is not set: torchtitan 0.2.2 trains on "c4_test", this run on '
        '"python_stdlib". For torchtitan\'s, set training.dataset_path to its '
        "tests/assets/c4_test.",
        "training.streaming is not set: torchtitan 0.2.2 reads the documents in their order, this "
        "run tokenizes all of them before the first step and shuffles their blocks. For "
        "torchtitan's, set it to true.",
        "validation.seq_len is not set: torchtitan 0.2.2 validates with 2048, this run with "
        "training.seq_len = 4096. For torchtitan's, set it to 2048.",
        "training.mixed_precision_param is not set: torchtitan 0.2.2 computes in bfloat16, this "
        'run in float32, because it has no GPU. For torchtitan\'s, set it to "bfloat16".',
        "optimizer.decay_norms_biases_embeddings is not set: torchtitan 0.2.2 applies weight_decay "
        "= 0.1 to all parameters, this run not to norms, biases and embeddings. For torchtitan's, "
        "set it to true.",
        "fault_tolerance.world_size_mode is not set: torchtitan 0.2.2 gives each replica a global "
        "batch of its own, this run divides one global batch over the replicas "
        '("constant_batch"). For torchtitan\'s, set it to "dynamic".',
    ]
    assert "model.router_bias_update_rate is not set: torchtitan 0.2.2 balances experts" in (
        " ".join(lines({"model": {"name": "qwen3", "flavor": "30B-A3B"}}))
    )


def test_explicitly_set_keys_are_not_mentioned() -> None:
    tables = {
        "model": {"flavor": "8B", "hf_assets_path": "assets"},
        "training": {"dataset": "c4", "mixed_precision_param": "float32"},
    }
    overrides = ["--training.streaming=false", "--optimizer.decay_norms_biases_embeddings=false"]
    assert lines(tables, *overrides) == []


def test_a_key_without_effect_is_one_line_with_the_reason() -> None:
    tables = {
        "optimizer": {"early_step_in_backward": True},
        "training": {"dataloader": {"num_workers": 2, "prefetch_factor": 4}},
        "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}},
    }
    assert list(without_effect(Config())) == []
    actual = {
        line.split(" has no effect here: ")[0]
        for line in without_effect(Config.model_validate(tables))
    }
    assert actual == {
        "optimizer.early_step_in_backward = true",
        "training.dataloader.prefetch_factor = 4",
        "quantize.linear.float8.enable_fsdp_float8_all_gather = true",
    }
    page = Path("docs/from_torchtitan.md").read_text()
    for key in (key for key in all_keys(Config).values() if key.no_effect):
        assert f"{key.path[-1]}`" in page


def test_a_start_has_one_line_about_torchtitan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, own = tmp_path / "theirs.toml", tmp_path / "own.toml"
    own.write_text("[training]\nsteps = 10\n")
    file.write_text("[quantize.linear.float8]\nprecompute_float8_dynamic_scale_for_fsdp = false\n")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with caplog.at_level("INFO", logger.name):
        for path in (own, file):
            log_about_keys(load_config(path, ["--job.device=cpu"]), path)
    (line,) = caplog.messages
    assert line == (
        f"{file} is a file of torchtitan: its defaults of model.hf_assets_path, training.dataset, "
        "training.streaming, training.mixed_precision_param, "
        "optimizer.decay_norms_biases_embeddings differ here. See docs/from_torchtitan.md."
    )
