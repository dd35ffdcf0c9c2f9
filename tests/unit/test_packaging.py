"""The script that runs every command in the environment of users."""

import argparse
from pathlib import Path

from torchtitan_lite.cli.parsers import parser

SCRIPT = Path(__file__).parents[2] / ".ci" / "commands"


def _commands(top: argparse.ArgumentParser) -> list[str]:
    """Return the commands of a parser; those with commands of their own as "convert to-hf"."""
    groups = [one for one in top._actions if isinstance(one, argparse._SubParsersAction)]
    named = {
        name: _commands(sub)
        for group in groups
        for name, sub in group.choices.items()
        if isinstance(sub, argparse.ArgumentParser)
    }
    return [f"{name} {sub}".strip() for name, subs in named.items() for sub in subs or [""]]


def test_every_console_command_is_run() -> None:
    commands = _commands(parser())
    assert {"train", "launch", "convert to-hf", "completion"} <= set(commands)
    script = SCRIPT.read_text()
    # The former name of `coordinator`.
    commands.remove("rendezvous")
    missing = [one for one in commands if f"torchtitan-lite {one} " not in script]
    assert missing == []


def test_every_group_of_options_that_starts_processes_is_run() -> None:
    script = SCRIPT.read_text().replace("\\\n", "")
    lines = [line for line in script.splitlines() if "small.toml" in line or "{train" in line]
    for words in (["--nproc"], ["--spares"], ["launch", "--spares"], ["--nnodes", "--rdzv"]):
        assert any(all(word in line for word in words) for line in lines), words
