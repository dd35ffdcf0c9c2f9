"""The outcome of each of the 66 TOML files that torchtitan 0.2.0 to 0.2.2 ships. The files
themselves are not part of this repository. Each row names one, with the settings that decide
whether it loads and on which mesh it fits; all other keys of torchtitan have its defaults. With
TORCHTITAN_REPOSITORY set to a git clone that has the tags, the files are read from there too."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import families
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import config_from

ALL = ("0.2.0", "0.2.1", "0.2.2")
REPOSITORY = os.environ.get("TORCHTITAN_REPOSITORY")
DEFAULTS: dict[str, Any] = json.loads(Path("tests/assets/torchtitan_defaults.json").read_text())[
    "config"
]

FLUX = (
    'FILE: model.name = "flux": image generation (Flux) is not supported; only text models can be '
    "trained.",
)
VLM = (
    'FILE: model.name = "vlm": vision-language models are not supported; only text models can be '
    "trained.",
)
TRANSFORMERS = (
    'FILE: model.name = "transformers_modeling_backend": modules of transformers are not '
    "supported. To train a model that config.json of a Hugging Face folder describes, set "
    'model.flavor = "hf" and model.hf_assets_path, and leave out model.name and '
    "[hf_transformers].",
)
FLOAT8 = (
    'FILE: model.converters[0]: given "float8" (string), needed one of '
    '"quantize.linear.float8", "lora". It is a name of an earlier torchtitan, now '
    '"quantize.linear.float8".',
)
FRAGMENTS = (
    'fault_tolerance.num_fragments = 2 has no effect without semi_sync_method = "streaming_diloco".'
    ' Set semi_sync_method = "streaming_diloco", which torchtitan means by "diloco" with '
    "fragments, or num_fragments = 1.",
)


@dataclass(frozen=True, kw_only=True)
class File:
    """A file and its outcome."""

    path: str
    releases: tuple[str, ...] = ALL
    name: str
    flavor: str = "debugmodel"
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 8
    load_errors: tuple[str, ...] = ()
    """Error lines of loading. Empty if the file loads."""
    unfit: tuple[str, ...] = ()
    """Error lines of a file that loads but does not fit `ranks` processes on a CPU."""

    @property
    def tables(self) -> dict[str, Any]:
        """All keys of torchtitan, with the settings of this file."""
        tables: dict[str, Any] = {}
        own = {"model.name": self.name, "model.flavor": self.flavor}
        for key, value in (DEFAULTS | own | self.settings).items():
            *outer, last = key.split(".")
            table = tables
            for part in outer:
                table = table.setdefault(part, {})
            if value is not None:
                table[last] = value
        return tables


def _flux(path: str, releases: tuple[str, ...], module: str) -> Iterator[File]:
    for file in ("debug_model", "flux_dev_model", "flux_schnell_model"):
        yield File(
            path=f"torchtitan/{path}/train_configs/{file}.toml",
            releases=releases,
            name="flux",
            flavor="flux-debug",
            settings={
                "job.custom_config_module": module,
                "encoder.t5_encoder": "google/t5-v1_1-xxl",
                "training.img_size": 256,
                "validation.denoising_steps": 4,
            },
            load_errors=FLUX,
        )


def _model(family: str, file: str, flavor: str = "debugmodel", **more: Any) -> File:
    name = "llama3" if family == "llama3_ft" else family
    return File(
        path=f"torchtitan/models/{family}/train_configs/{file}.toml",
        name=name,
        flavor=flavor,
        **more,
    )


FEW_MICROBATCHES = (
    "A step of 2 samples gives each pipeline 1 microbatches of 1 (over 2 batch ranks), fewer than "
    "its 4 stages. Set training.global_batch_size = 8 or more.",
)
"""torchtitan trains with this bubble, and warns."""
FILES = [
    File(path="tests/integration_tests/base_config.toml", name="llama3"),
    *_flux("experiments/flux", ("0.2.0",), "torchtitan.experiments.flux.job_config"),
    *_flux("models/flux", ("0.2.1", "0.2.2"), "torchtitan.models.flux.job_config"),
    File(
        path="torchtitan/experiments/vlm/train_configs/debug_model.toml",
        name="vlm",
        settings={
            "job.custom_config_module": "torchtitan.experiments.vlm.job_config",
            "data.max_images_per_batch": 64,
        },
        load_errors=VLM,
    ),
    *(
        File(
            path=f"torchtitan/experiments/transformers_modeling_backend/configs/{file}.toml",
            releases=("0.2.1", "0.2.2"),
            name="transformers_modeling_backend",
            flavor=flavor,
            settings={"hf_transformers.model": "Qwen/Qwen3-4B-Instruct-2507"},
            load_errors=TRANSFORMERS,
        )
        for file, flavor in (("debug_model", "debugmodel"), ("full", "full"))
    ),
    _model("llama3", "debug_model"),
    _model("llama3", "llama3_8b", "8B", settings={"training.local_batch_size": 1}),
    _model(
        "llama3",
        "llama3_70b",
        "70B",
        settings={"parallelism.tensor_parallel_degree": 8},
        ranks=256,
    ),
    _model(
        "llama3",
        "llama3_405b",
        "405B",
        settings={
            "model.converters": ["float8"],
            "parallelism.tensor_parallel_degree": 8,
            "parallelism.enable_async_tensor_parallel": True,
            "compile.enable": True,
            "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
        },
        load_errors=FLOAT8,
    ),
    _model(
        "llama3_ft",
        "debug_model",
        settings={
            "job.custom_config_module": "torchtitan.components.ft.config",
            "training.steps": 100,
            "fault_tolerance.enable": True,
            "fault_tolerance.process_group": "nccl",
            "fault_tolerance.semi_sync_method": "diloco",
            "fault_tolerance.sync_steps": 10,
            "fault_tolerance.num_fragments": 2,
        },
        unfit=FRAGMENTS,
    ),
    _model("qwen3", "qwen3_0.6b", "0.6B"),
    _model("qwen3", "qwen3_1.7b", "1.7B"),
    _model("qwen3", "qwen3_32b", "32B"),
    _model("qwen3", "qwen3_moe_debug", "debugmodel_moe"),
    _model("deepseek_v3", "debug_model"),
    _model(
        "deepseek_v3",
        "deepseek_v3_16b",
        "16B",
        settings={"parallelism.expert_parallel_degree": 8},
    ),
    _model("deepseek_v3", "deepseek_v3_671b", "671B"),
    _model(
        "llama4",
        "debug_model",
        settings={"quantize.linear.mx.filter_fqns": ["output", "router.gate"]},
    ),
    *(
        _model(
            "llama4",
            f"llama4_{flavor}",
            flavor,
            settings={
                "parallelism.tensor_parallel_degree": 8,
                "parallelism.expert_tensor_parallel_degree": 8,
                "parallelism.pipeline_parallel_degree": stages,
                "training.local_batch_size": batch,
            },
            ranks=64,
            unfit=unfit,
        )
        for flavor, stages, batch, unfit in (
            ("17bx16e", 1, 8, ()),
            ("17bx128e", 4, 1, FEW_MICROBATCHES),
        )
    ),
    File(
        path="torchtitan/experiments/gpt_oss/train_configs/debug_model.toml",
        releases=("0.2.1",),
        name="gpt_oss",
    ),
    _model("gpt_oss", "debug_model", releases=("0.2.2",)),
]


def test_there_are_66_files() -> None:
    named = [(release, file.path) for file in FILES for release in file.releases]
    assert len(set(named)) == len(named) == 66


@pytest.fixture(autouse=True)
def folder_with_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_each_file_has_the_expected_outcome(file: File) -> None:
    check(file, file.tables)


@pytest.mark.skipif(REPOSITORY is None, reason="needs TORCHTITAN_REPOSITORY, a clone of torchtitan")
@pytest.mark.parametrize(
    ("release", "file"),
    [
        pytest.param(release, file, id=f"{release}-{file.path}")
        for file in FILES
        for release in file.releases
    ],
)
def test_each_file_of_a_clone_has_the_expected_outcome(release: str, file: File) -> None:
    shown = subprocess.run(
        ["git", "-C", str(REPOSITORY), "show", f"v{release}:{file.path}"],
        capture_output=True,
        check=True,
        text=True,
    )
    check(file, tomli.loads(shown.stdout))


def check(file: File, tables: dict[str, Any]) -> None:
    """Load the tables and compare the outcome with the expected one."""
    assets = tables["model"].get("hf_assets_path")
    if assets:
        Path(assets).mkdir(parents=True, exist_ok=True)
    if file.load_errors:
        assert problems(lambda: config_from(tables, "FILE")) == file.load_errors
        return
    config = config_from(tables, "FILE", ["--job.device=cpu"])
    actual = problems(lambda: check_against(config, file.ranks))
    if file.name in families():
        assert actual == file.unfit
    else:
        # Further errors depend on the model.
        assert len(actual) == 1
        assert actual[0].startswith(f'model.name = "{file.name}" is not one of deepseek_v3, ')


def problems(call: Any) -> tuple[str, ...]:
    """Return the lines of the error, without the one that counts them."""
    try:
        call()
    except ConfigError as error:
        lines = str(error).splitlines()
        return tuple(line.strip() for line in (lines[1:] if len(lines) > 1 else lines))
    return ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"job.custom_config_module": "torchtitan.experiments.forge.job_config"},
            'FILE: job.custom_config_module = "torchtitan.experiments.forge.job_config" has the '
            "keys of a feature of torchtitan that is not supported. Leave it out, with its keys. "
            'Accepted is "torchtitan.components.ft.config".',
        ),
        (
            {"model.name": "simple_fsdp.llama3"},
            'FILE: model.name = "simple_fsdp.llama3": the experiment simple_fsdp of torchtitan is '
            'not supported. Set model.name = "llama3".',
        ),
        (
            {"model.converters": ["quantize.linear.mx"]},
            'FILE: model.converters[0]: given "quantize.linear.mx" (string), needed one of '
            '"quantize.linear.float8", "lora". MX formats are not supported.',
        ),
        (
            {"fault_tolerance.module_fqns_per_model_fragment": [["output"]]},
            "FILE: fault_tolerance.module_fqns_per_model_fragment: choosing the modules of each "
            'fragment is not supported by this version; only [] is accepted, got [["output"]]',
        ),
    ],
)
def test_unsupported_features_are_rejected_in_one_line(
    settings: dict[str, Any], expected: str
) -> None:
    tables = File(path="", name="llama3", settings=settings).tables
    assert problems(lambda: config_from(tables, "FILE")) == (expected,)


@pytest.mark.parametrize("key", ["job.custom_config_module", "experimental.custom_args_module"])
def test_torchtitans_fault_tolerance_section_is_accepted(key: str) -> None:
    settings = {key: "torchtitan.components.ft.config", "fault_tolerance.sync_steps": 7}
    tables = File(path="", name="llama3", settings=settings).tables
    assert config_from(tables, "FILE").fault_tolerance.sync_steps == 7


def test_the_name_of_a_converter_is_explained_on_the_command_line() -> None:
    actual = problems(lambda: config_from({}, "FILE", ["--model.converters", "float8"]))
    assert len(actual) == 1
    assert actual[0].endswith(
        'It is a name of an earlier torchtitan, now "quantize.linear.float8".'
    )
