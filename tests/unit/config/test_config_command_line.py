"""The command line, `--help`, and the generated reference of keys."""

from pathlib import Path

import pytest

from scripts.config_reference import is_current
from torchtitan_lite.config import Config
from torchtitan_lite.config.keys import all_keys, groups, value_text
from torchtitan_lite.config.reference import help_text, markdown
from torchtitan_lite.config.torchtitan_keys import DEFAULTS
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.training.run_config import parse_command_line

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7\n")
    return path


@pytest.mark.parametrize("option", ["--config", "--job.config_file", "--job.config-file"])
@pytest.mark.parametrize("joined", [True, False])
def test_ways_to_name_the_file(file: Path, option: str, joined: bool) -> None:
    named = [f"{option}={file}"] if joined else [option, str(file)]
    config, path = parse_command_line(["--training.seq_len", "64", *named, "--checkpoint.enable"])
    assert path == file
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert config.checkpoint.enable


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "No configuration given: add --config FILE."),
        (["--config"], "--config needs a file"),
        (["--config", "--training.steps", "5"], "--config needs a file"),
        (["--config", "a.toml", "--config=b.toml"], "2 configurations given, needed one: a.toml"),
    ],
)
def test_invalid_file_options(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_command_line(arguments)
    assert expected in str(raised.value)


def test_known_files_are_listed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "llama3_debug.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        parse_command_line([])
    assert "There are configs/llama3_debug.toml." in str(raised.value)


def test_help_lists_every_key_with_type_and_default(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        parse_command_line(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    for group in groups(Config):
        assert f"\n{group.header}\n" in printed
        assert group.meaning
        for key in group.keys:
            assert key.meaning, f"{key.name} has no docstring"
            assert key.meaning in printed
            name = key.path[-1] if group.repeated else f"--{key.name}"
            line = next(text for text in printed.splitlines() if text.startswith(f"  {name}  ("))
            assert f"default {value_text(key.default)}" in line
    assert '--job.device  (one of "auto", "cpu", "cuda"; default "auto")' in printed


def test_help_is_printed_by_one_rank(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse_command_line(["-h"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_is_wrapped(width: int) -> None:
    # The usage line and long names are not wrapped.
    wrapped = help_text(Config, width).splitlines()[2:]
    assert max(len(line) for line in wrapped if " " in line.strip()) <= width


def test_the_walk_reaches_every_section() -> None:
    paths = {group.path for group in groups(Config)}
    assert set(Config.model_fields) == {path[0] for path in paths}
    assert ("training", "dataloader") in paths
    assert ("training", "corpora") in paths


def test_defaults_of_torchtitan_that_differ_are_in_the_reference() -> None:
    keys = all_keys(Config)
    for name, theirs in DEFAULTS.items():
        assert keys[name].default != theirs, f"{name} has torchtitan's default"
        assert f"(torchtitan: `{value_text(theirs)}`)" in markdown(Config)


def test_the_reference_is_up_to_date() -> None:
    assert is_current(ROOT / "docs" / "configuration.md"), "run python -m scripts.config_reference"


def test_an_outdated_reference_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "configuration.md"
    assert not is_current(page)
    page.write_text(markdown(Config).replace("steps", "stpes"))
    assert not is_current(page)


def test_the_help_of_a_section_has_its_keys_only() -> None:
    text = help_text(Config, 100, ["lr_scheduler", "optimizer"])
    assert "[lr_scheduler]" in text and "[optimizer]" in text and "[training]" not in text
