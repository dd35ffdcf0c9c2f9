"""Run the commands of the documentation: the ```bash blocks of a page, in order, in a copy of the
tree with small settings and in an environment of requirements.txt alone, as users have it.

Comments in a page steer this, each on a line of its own:

- `<!-- test: background until REGEX -->` in front of a block: start it in the background and wait
  until its output matches;
- `<!-- test: wait for REGEX -->` behind a block: wait until the output of that background block
  matches;
- `<!-- test: fails -->` in front of a block: its last command exits with an error.
"""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tests.end_to_end.slurm import write_command
from tests.harness.jobs import FIXTURE

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<before>[^\n]*?) -->\n)?"
    r"^```bash\n(?P<text>.*?)^```$"
    r"(?:\n<!-- test: wait for (?P<after>[^\n]*?) -->$)?",
    re.MULTILINE | re.DOTALL,
)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
_LINKED = (
    "torchtitan_lite", "models", "checkpoint", "scripts", "benchmarks", "deploy", "tests", "docs",
    "train.py", "requirements.txt", "requirements-dev.txt", "Makefile", "pyproject.toml",
)  # fmt: skip
_SETTINGS = {
    "steps": "4",
    "local_batch_size": "2",
    "global_batch_size": "4",
    "seq_len": "64",
    "warmup_steps": "1",
    "interval": "2",
    "freq": "2",
    "held_out_fraction": "0.2",
}
_ESTIMATED = ("llama3_8b.toml",)
"""Configs that are estimated, not run: they keep their settings."""
_USER_VENV = ".venv-user"
_ENDLESS = "100000"
"""Steps of a run that a later command stops."""


@dataclass(frozen=True)
class Block:
    """One block of commands."""

    commands: tuple[str, ...]
    until: str | None = None
    """If set, the block runs in the background, and the test waits until its output matches."""
    wait_for: str | None = None
    """Pattern that the output of the background block must match after this one."""
    fails: bool = False


def pages() -> list[str]:
    """Return all pages with commands, relative to the root."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return sorted(str(p.relative_to(ROOT)) for p, text in texts.items() if _BLOCK.search(text))


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    parsed = []
    for one in _BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        before = one["before"] or ""
        until = before.removeprefix("background until ")
        parsed.append(
            Block(
                tuple(split(one["text"])),
                until=until if until != before else None,
                wait_for=one["after"],
                fails=before == "fails",
            )
        )
    return parsed


def split(text: str) -> list[str]:
    """Split a block into commands: lines with their continuations and here-documents, without
    comments."""
    commands: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command += "\n" + next(lines)
        here = _HEREDOC.search(command)
        while here and not command.endswith(f"\n{here[1]}"):
            command += "\n" + next(lines)
        if command.strip() and not command.lstrip().startswith("#"):
            commands.append(command)
    return commands


def user_environment() -> Path:
    """Return an environment of requirements.txt alone, which is created at its first use."""
    with (ROOT / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", f"{_USER_VENV}/.installed"], cwd=ROOT, check=True)
    return ROOT / _USER_VENV


def copy_tree(folder: Path) -> None:
    """Create a tree in which the commands of the docs run: links to the code and to the
    environment, copies of the configs with small settings. Outputs of the runs stay in `folder`."""
    folder.mkdir(parents=True)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    copy_configs(folder)
    # With the stamp by which make finds it complete.
    (folder / ".venv").mkdir()
    for entry in user_environment().iterdir():
        if not entry.name.startswith("."):
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv" / ".installed").touch()
    # The command of an installation.
    write_command(folder / ".bin" / "torchtitan-lite", 'exec python -m torchtitan_lite "$@"')


def copy_configs(folder: Path) -> None:
    """Copy the configs, with small settings, to a folder below `folder`."""
    (folder / "configs").mkdir()
    for config in (ROOT / "configs").glob("*.toml"):
        text = config.read_text(encoding="utf-8")
        endless = {"steps": _ENDLESS} if config.stem.endswith("_ft") else {}
        settings = {} if config.name in _ESTIMATED else _SETTINGS | endless
        for key, value in settings.items():
            text = re.sub(rf"^{key} = [\d.]+$", f"{key} = {value}", text, flags=re.MULTILINE)
        # Corpora of the size of the standard library take a minute to tokenize.
        corpus = f'dataset_path = "{FIXTURE}"'
        text = text.replace('dataset = "python_stdlib"', corpus)
        text = text.replace('"tests/assets/', f'"{ROOT}/tests/assets/')
        (folder / "configs" / config.name).write_text(text, encoding="utf-8")


@dataclass
class Page:
    """A page whose commands are run in a tree."""

    tree: Path
    variables: Mapping[str, str]
    timeout_s: float = 240.0
    output: str = ""
    """Output of all foreground commands so far."""
    _background: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def run(self, block: Block, skipped: list[str]) -> None:
        """Run the commands of a block except the `skipped` ones."""
        commands = [command for command in block.commands if command not in skipped]
        if not commands:
            return
        script = "\n".join(["set -eo pipefail", *self._exports(commands)])
        if block.until is not None:
            log = self.tree / f"background_{len(self._background)}.log"
            with log.open("wb") as file:
                process = self._start(script, file)
            self._background.append((process, log))
            self._wait_for(block.until)
            return
        log = self.tree / "foreground.log"
        with log.open("wb") as file:
            process = self._start(script, file)
        try:
            status = process.wait(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none after {self.timeout_s} s"
        finally:
            _end(process)
        printed = log.read_text(encoding="utf-8", errors="replace")
        self.output += printed
        if (status != 0) != block.fails:
            raise AssertionError(f"{commands}\nexit status {status}:\n{printed[-5000:]}")
        if block.wait_for is not None:
            self._wait_for(block.wait_for)

    def close(self) -> None:
        """Stop the background blocks as Ctrl-C does."""
        for process, _ in self._background:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            _end(process)

    def _exports(self, commands: list[str]) -> list[str]:
        # Exported variables and the activated environment last for the page, as in one terminal.
        saved = self.tree / ".exports"
        before = [f"source {shlex.quote(str(saved))}"] if saved.exists() else []
        return [*before, *commands, f"export -p >{shlex.quote(str(saved))}"]

    def _start(self, script: str, file: BinaryIO) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "PATH": f"{self.tree / '.bin'}:{self.tree / '.venv' / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.variables,
        }
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.tree.resolve(),
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait_for(self, pattern: str) -> None:
        process, log = self._background[-1]
        deadline = time.monotonic() + self.timeout_s
        while not re.search(pattern, log.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no output matches {pattern!r}:\n{log.read_text()[-5000:]}")
            time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the remaining processes of a command, which has a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
