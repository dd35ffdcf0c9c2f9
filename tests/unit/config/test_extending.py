"""A user's config sections: merging, inherited values, and errors."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchtitan_lite.checkpoint import recorded_config
from torchtitan_lite.cli import main
from torchtitan_lite.config import Config, check_live_resize
from torchtitan_lite.config.custom_tables import schema_for
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.config.tables.section import Section
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY, register_dataset, register_model
from torchtitan_lite.models import model_spec


@dataclass
class Custom:
    x: int = 1
    """Some number."""
    names: list[str] = field(default_factory=lambda: ["a"])


class Strict(Section):
    given: int


@dataclass
class Odd:
    pair: tuple[str, ...] = ()


Use = Callable[[type], dict[str, Any]]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function from a class JobConfig to the sections of a file that names its module."""

    def named(job_config: type) -> dict[str, Any]:
        module = ModuleType("users_config")
        module.JobConfig = job_config  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "users_config", module)
        return {"job": {"custom_config_module": "users_config"}}

    return named


def test_defaults_are_those_of_the_users_instances(use: Use) -> None:
    @dataclass
    class JobConfig:
        custom: Custom = field(default_factory=lambda: Custom(x=7))

    config: Any = schema_for(use(JobConfig)).model_validate({})
    assert (config.custom.x, config.custom.names) == (7, ["a"])
    assert config.training == Config().training


def test_values_that_a_file_could_not_set_are_rejected(use: Use) -> None:
    @dataclass
    class WithOdd:
        custom: Odd = field(default_factory=Odd)

    class WithStrict(Section):
        custom: Strict

    wrong = {
        "Odd.pair is of type tuple": WithOdd,
        "custom has no default": WithStrict,
        "fields": int,
    }
    for error, job_config in wrong.items():
        with pytest.raises(ConfigError, match=error):
            schema_for(use(job_config))


def test_a_resize_compares_keys_that_are_in_no_section(use: Use) -> None:
    @dataclass
    class JobConfig:
        note: str = "x"

    named = use(JobConfig) | {
        "checkpoint": {"enable": True, "ram_interval": 1},
        "training": {"global_batch_size": 8},
    }
    config, other = (
        schema_for(named).model_validate(one) for one in (named, named | {"note": "y"})
    )
    check_live_resize(config, config, is_joint=False)
    with pytest.raises(ConfigError, match="note would change from 'x' to 'y'"):
        check_live_resize(config, other, is_joint=False)


def test_a_run_without_snapshots_is_not_resized() -> None:
    tables = {"checkpoint": {"enable": True, "async_mode": "disabled"}}
    config = Config.model_validate(tables | {"training": {"global_batch_size": 8}})
    with pytest.raises(ConfigError, match='checkpoint.async_mode = "async"'):
        check_live_resize(config, config, is_joint=False)


@pytest.mark.parametrize("key", ["job.custom_config_module", "experimental.custom_args_module"])
def test_a_recorded_config_is_read_without_the_module(key: str) -> None:
    recorded: dict[str, Any] = Config().model_dump() | {"custom": {"x": 1}}
    section, _, name = key.partition(".")
    recorded[section][name] = "nowhere_to_be_found"
    recorded["training"]["of_the_user"] = 3
    assert recorded_config(recorded, "here").model == Config().model
    assert "nowhere_to_be_found" not in sys.modules


def test_existing_names_are_rejected() -> None:
    register_dataset("test_extending_texts", list)
    with pytest.raises(ConfigError, match="registered twice"):
        register_dataset("test_extending_texts", lambda: ["other"])
    register_model("llama3", "json")
    try:
        with pytest.raises(ConfigError, match="a name of this package"):
            model_spec(ModelConfig(name="llama3"))
    finally:
        del REGISTRY.models["llama3"]
        del REGISTRY.datasets["test_extending_texts"]


def test_a_module_that_exits_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module_that_exits.py").write_text("import sys; sys.exit('licence missing')\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[experimental]\ncustom_import = 'module_that_exits'\n")
    assert main(["train", "--config", "run.toml"]) == 1
    assert "licence missing" in capsys.readouterr().err
