"""Loading of a configuration file and its overrides, and the error for each mistake."""

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import Config, to_toml
from torchtitan_lite.config.keys import all_keys
from torchtitan_lite.config.torchtitan_keys import (
    REMOVED_KEYS,
    RENAMED_KEYS,
    RENAMED_NOTES,
    RENAMED_SECTIONS,
)
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.training.run_config import load_config

# In the format of the files that torchtitan 0.2.2 ships: all sections, its own key names.
TORCHTITAN_FILE = """
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_config = false

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 1
disable_color_printing = false
enable_tensorboard = false
save_tb_folder = "tb"
enable_wandb = false

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
converters = []

[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0

[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1
steps = 10
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 10
last_save_model_only = false
export_dtype = "float32"
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[compile]
enable = false
components = ["model", "loss"]

[comm]
train_timeout_seconds = 100

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]

[quantize.grouped_mm.float8]
fqns = []

[memory_estimation]
enable = false

[fault_tolerance]
enable = false
semi_sync_method = "none"

[experimental]
custom_args_module = ""

[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return str(raised.value).replace(str(path), "FILE")


def test_an_empty_file_gives_the_defaults(write) -> None:
    assert load_config(write("")) == Config()


def test_a_torchtitan_file_loads_unchanged(write) -> None:
    config = load_config(write(TORCHTITAN_FILE))
    assert config.training.max_norm == 1.0
    assert config.lr_scheduler.decay_ratio == 0.8
    assert config.quantize.linear.float8.filter_fqns == ["output"]


@pytest.mark.parametrize(
    ("off", "on", "key", "feature"),
    [
        (
            "[memory_estimation]\nenable = false",
            "[memory_estimation]\ndisable_fake_mode = true",
            "memory_estimation.disable_fake_mode",
            "an estimate with real tensors",
        ),
    ],
)
def test_an_enabled_unsupported_feature_is_rejected_by_name(
    write, off: str, on: str, key: str, feature: str
) -> None:
    assert off in TORCHTITAN_FILE
    text = message(write(TORCHTITAN_FILE.replace(off, on)))
    assert text.startswith(f"FILE: {key}")
    assert "not supported by this version" in text
    assert feature in text


def test_unknown_names_come_with_the_nearest_one(write) -> None:
    text = message(write("[trainin]\nsteps = 1\n[optimizer]\nweight_decy = 0.1\n"))
    assert "FILE: [trainin]: unknown section. Did you mean [training]?" in text
    assert "FILE: optimizer.weight_decy: unknown key. Did you mean optimizer.weight_decay?" in text


def test_an_unknown_name_without_a_similar_one_lists_the_known_names(write) -> None:
    text = message(write("[zzz]\na = 1\n[compile]\nqqq = 1\n"))
    assert "Sections are job, model, training" in text
    assert "Keys of [compile] are enable, components, backend." in text


def test_unknown_keys_of_nested_tables(write) -> None:
    text = message(
        write(
            "[training.dataloader]\nnum_worker = 0\n"
            '[[training.corpora]]\ndataset = "c4"\n'
            '[[training.corpora]]\ndataset = "c4"\nwieght = 2.0\n'
        )
    )
    assert (
        "training.dataloader.num_worker: unknown key. Did you mean training.dataloader.num_workers?"
        in text
    )
    assert (
        "training.corpora[1].wieght: unknown key. Did you mean training.corpora[1].weight?" in text
    )


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (
            '[optimzer]\nname = "AdamW"\nlr = 1e-3\n[optimzer.more]\nx = 1\n',
            [],
            "FILE: [optimzer]: unknown section. Did you mean [optimizer]?",
        ),
        ("[[optimzer]]\nlr = 1\n", [], "FILE: [optimzer]: unknown section. Did you mean [optimi"),
        (
            "[training.dataloder]\nnum_workers = 1\npin_memory = true\n",
            [],
            "FILE: training.dataloder: unknown key. Did you mean training.dataloader?",
        ),
        (
            "",
            ["--optimzer.lr=1", "--optimzer.name=AdamW"],
            "command line: [optimzer]: unknown section. Did you mean [optimizer]?",
        ),
        ("", ["--optimzer.more.lr", "1"], "command line: [optimzer]: unknown section."),
    ],
)
def test_a_mistyped_table_is_one_problem(
    write, text: str, arguments: list[str], expected: str
) -> None:
    (line,) = message(write(text), *arguments).splitlines()
    assert line.startswith(expected)


def test_a_key_without_a_section(write) -> None:
    assert message(write("seq_len = 5\nwarmup_steps = 1\n")).splitlines()[1:] == [
        "  FILE: seq_len: a key without a section. "
        "Did you mean training.seq_len or validation.seq_len?",
        "  FILE: warmup_steps: a key without a section. Did you mean lr_scheduler.warmup_steps?",
    ]


def test_all_problems_at_once_each_named(write) -> None:
    path = write(
        '[training]\nsteps = "many"\nbatch_size = 8\nlocal_batch_size = 0\n'
        '[job]\ndevice = "cud"\n[checkpoint]\nenable = 1\n[metrics]\nlog_freq = 0.5\n'
    )
    text = message(path, "--optimizer.lr", "fast", "--model.flavour=8B")
    assert text.startswith("The configuration has 8 problems:")
    for line in (
        'FILE: training.steps: given "many" (string), needed an integer',
        "FILE: training.batch_size: unknown key. "
        "It is a name of an earlier torchtitan, now training.local_batch_size.",
        "FILE: training.local_batch_size: must be at least 1, got 0",
        'FILE: job.device: given "cud" (string), needed one of "auto", "cpu", "cuda". '
        'Did you mean "cuda"?',
        "FILE: checkpoint.enable: given 1 (integer), needed true or false",
        "FILE: metrics.log_freq: given 0.5 (number), needed an integer",
        'command line: optimizer.lr: given "fast", needed a number',
        "command line: model.flavour: unknown key. Did you mean model.flavor?",
    ):
        assert f"  {line}\n" in f"{text}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[training]\nsteps = "5"', 'given "5" (string), needed an integer'),
        ("[training]\nsteps = true", "given true (boolean), needed an integer"),
        ("[training]\nmax_norm = true", "given true (boolean), needed a number"),
        ("[job]\ndescription = 5", "given 5 (integer), needed a string"),
        ("[job]\ndescription = 2020-01-01", "given 2020-01-01 (date or time), needed a string"),
        ("[lr_scheduler]\ntotal_steps = 'x'", 'given "x" (string), needed an integer or none'),
        ('[compile]\ncomponents = "model"', 'needed a list of one of "model", "loss"'),
        ("[compile]\ncomponents = [1]", "compile.components[0]: given 1 (integer), needed "),
        ("[training]\ndataloader = 1", "training.dataloader: given 1 (integer), needed a table"),
        ("[training]\ncorpora = [1]", "training.corpora[0]: given 1 (integer), needed a table"),
        ("training = 5", "training: given 5 (integer), needed a table"),
        ("[quantize]\nlinear = 1\n[quantize.x]\na = 1\n[training]\nsteps=1.5", "needed an integer"),
    ],
)
def test_wrong_types_are_described(write, text: str, expected: str) -> None:
    assert expected in message(write(text))


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5"], "training.steps", 5),
        (["--training.local-batch-size", "2"], "training.local_batch_size", 2),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--training.steps", "1"], "checkpoint.enable", True),
        (["--checkpoint.enable", "false"], "checkpoint.enable", False),
        (["--checkpoint.enable=True"], "checkpoint.enable", True),
        (["--checkpoint.no_initial_load_model_only"], "checkpoint.initial_load_model_only", False),
        (["--checkpoint.no-initial-load-model-only"], "checkpoint.initial_load_model_only", False),
        (["--job.description", "a = b, c"], "job.description", "a = b, c"),
        (["--job.description="], "job.description", ""),
        (["--activation_checkpoint.mode", "none"], "activation_checkpoint.mode", "none"),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--debug.seed", "7"], "debug.seed", 7),
        (
            ["--parallelism.context_parallel_load_balancer", "none"],
            "parallelism.context_parallel_load_balancer",
            None,
        ),
        (["--compile.components", "model"], "compile.components", ["model"]),
        (["--compile.components", "model, loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", '["loss"]'], "compile.components", ["loss"]),
        (["--compile.components", "[]"], "compile.components", []),
        (["--training.dataloader.num_workers", "0"], "training.dataloader.num_workers", 0),
        (["--training.steps", "5", "--training.steps", "6"], "training.steps", 6),
        (
            ["--quantize.linear.float8.filter_fqns", "output"],
            "quantize.linear.float8.filter_fqns",
            ["output"],
        ),
    ],
)
def test_overrides(write, arguments: list[str], key: str, value: Any) -> None:
    actual: Any = load_config(write("[debug]\nseed = 3\n[training]\nsteps = 4\n"), arguments)
    for part in key.split("."):
        actual = getattr(actual, part)
    assert actual == value
    assert type(actual) is type(value)


def test_a_list_of_tables_on_the_command_line(write) -> None:
    value = '[{dataset = "c4", weight = 2.0}, {dataset = "text"}]'
    corpora = load_config(write(""), ["--training.corpora", value]).training.corpora
    assert [(corpus.dataset, corpus.weight) for corpus in corpora] == [("c4", 2.0), ("text", 1.0)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.steps", "1.5"], 'training.steps: given "1.5", needed an integer'),
        (["--training.steps"], "training.steps: given no value, needed an integer"),
        (["--training.steps", "0"], "training.steps: must be at least 1, got 0"),
        (["--training.steps", "none"], 'training.steps: given "none", needed an integer'),
        (["--checkpoint.enable", "maybe"], 'checkpoint.enable: given "maybe", needed true or f'),
        (["--checkpoint.no_enable", "false"], "--checkpoint.no_enable takes no value"),
        (["--job.device", "gpu"], 'given "gpu", needed one of "auto", "cpu", "cuda"'),
        (["--compile.components", "[1]"], "compile.components[0]: given 1 (integer), needed "),
        (["--compile.components", "[oops"], 'given "[oops", needed a list of one of'),
        (["--training", "5"], "training: a section; set one of its keys, as --training."),
        (["--steps", "5"], "steps: a key without a section. Did you mean training.steps"),
        (["--trainin.steps", "5"], "[trainin]: unknown section. Did you mean [training]?"),
        (["--float8.recipe_name", "x"], "now [quantize.linear.float8]."),
        (["--training.dataloader.workers", "1"], "training.dataloader.workers: unknown key"),
        (["training.steps", "5"], "unexpected 'training.steps'; write --section.key value"),
        (["--", "5"], "names no key"),
    ],
)
def test_wrong_overrides(write, arguments: list[str], expected: str) -> None:
    text = message(write(""), *arguments)
    assert text.splitlines()[0].startswith("command line: ") or "problems" in text
    assert expected in text


def test_an_override_hides_the_wrong_value_of_the_file(write) -> None:
    path = write('[training]\nsteps = "x"\n')
    assert load_config(path, ["--training.steps", "3"]).training.steps == 3
    assert message(path, "--training.steps", "y").startswith("command line: training.steps")


def test_a_conflict_between_file_and_command_line_names_both(write) -> None:
    text = message(write("[profiling]\nprofiler_warmup = 3\n"), "--profiling.profile_freq", "2")
    assert text.startswith("FILE and command line: profiling: profiler_warmup (3) + ")


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_renamed_keys_get_a_hint(write, old: str, new: str) -> None:
    section, _, key = old.rpartition(".")
    for text in (message(write(f"[{section}]\n{key} = 1\n")), message(write(""), f"--{old}", "1")):
        assert f"{old}: unknown key. It is a name of an earlier torchtitan, now {new}" in text


def test_the_table_of_renames_is_consistent() -> None:
    keys = all_keys(Config)
    assert set(RENAMED_KEYS.values()) <= set(keys)
    assert not (set(RENAMED_KEYS) | set(REMOVED_KEYS)) & set(keys)
    assert set(RENAMED_NOTES) <= set(RENAMED_KEYS)
    assert not set(RENAMED_SECTIONS) & set(Config.model_fields)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
        ("experimental.context_parallel_degree", "parallelism.context_parallel_degree"),
        ("experimental.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule"),
        ("training.warmup_steps", "lr_scheduler.warmup_steps"),
        ("training.seed", "debug.seed"),
    ],
)
def test_moved_keys_are_found_in_their_new_section(write, old: str, new: str) -> None:
    assert f"{old}: unknown key. Did you mean {new}?" in message(write(""), f"--{old}", "1")


def test_removed_keys_and_sections(write) -> None:
    text = message(write('[float8]\nrecipe_name = "x"\n[model]\nnorm_type = "rmsnorm"\n'))
    assert "[float8]: unknown section. It is a name of an earlier torchtitan, now [quant" in text
    assert "model.norm_type: unknown key. It has no counterpart here: each model family" in text


def test_broken_toml_is_one_error_with_its_line(write) -> None:
    text = message(write("[model]\nflavor = debugmodel\n"), "--nonsense")
    assert text.startswith("FILE: not valid TOML: ")
    assert "line 2" in text
    assert "The line is: flavor = debugmodel  (text needs quotes" in text


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config(path, []).training.steps == 7


def test_a_file_that_is_missing_or_not_text(write, tmp_path: Path) -> None:
    write("", "my_llama_debug.toml")
    text = message(tmp_path / "my_lama_debug.toml")
    assert f"no such file. Did you mean {tmp_path / 'my_llama_debug.toml'}" in text
    assert "cannot be read: Is a directory" in message(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not a text file in UTF-8" in message(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--parallelism.context_parallel_load_balancer", "none"],
        ["--debug.seed", "5", "--job.description", 'a "quoted" \\ text', "--optimizer.eps=1e-20"],
        ["--training.corpora", '[{dataset = "c4"}, {dataset = "text", dataset_path = "a"}]'],
        ["--quantize.linear.float8.filter_fqns", '["output"]'],
    ],
)
def test_what_to_toml_writes_loads_as_an_equal_configuration(write, arguments: list[str]) -> None:
    config = load_config(write(TORCHTITAN_FILE.replace('"c4"', '"python_stdlib"')), arguments)
    again = load_config(write(to_toml(config), "again.toml"))
    assert again == config
    assert to_toml(again) == to_toml(config)


def test_an_unknown_part_of_the_state_cannot_be_excluded(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[checkpoint]\nexclude_from_loading = ["weights"]\n')
    with pytest.raises(ConfigError, match="exclude_from_loading") as error:
        load_config(file, [])
    assert "optimizer" in str(error.value)
