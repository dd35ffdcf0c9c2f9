"""The command line: fast help, one-line errors, completion."""

import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.cli import launch, main
from torchtitan_lite.cli.parsers import parser, size
from torchtitan_lite.core.errors import ConfigError

COMMANDS = ["train", "launch", "generate", "evaluate", "convert", "estimate", "inspect", "report"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchtitan_lite", *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_imports_no_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from torchtitan_lite.cli import main; "
        f"status = main([*{arguments!r}, '--help']); "
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_is_fast() -> None:
    """In half a second of CPU time on an idle machine, which a busy one may double."""
    taken_s = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert call("train", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken_s) < 1.0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torchtitan_lite ") and "torch " in out and len(out.splitlines()) == 1


def test_help_of_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "training", "[comm]"]) == 0
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line.startswith("[")]
    assert tables == [
        "[training]",
        "[[training.corpora]]",
        "[training.dataloader]",
        "[comm]",
    ]


def test_help_of_train_has_its_own_options_above_the_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    own, _, keys = capsys.readouterr().out.partition("\n[job]\n")
    for option in ("--nproc N", "--spares K", "--nnodes M", "--rdzv-endpoint", "--rdzv-id"):
        assert f"  {option}" in own
    assert "--training.steps" in keys


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train --nprocs 2 --config x.toml", "--nproc"),
        ("train --nprocs=2 --config x.toml", "--nproc"),
        ("train --spare 2 --config x.toml", "--spares"),
        ("train --rdzv-endpont a:1 --config x.toml", "--rdzv-endpoint"),
        ("train --confg x.toml", "--config"),
        ("launch --replica 2 -- --config x.toml", "--replicas"),
        ("launch --replicas 2 --spare 2 -- --config x.toml", "--spares"),
        ("generate x --promt hi", "--prompt"),
        ("evaluate x --dataset-pth y", "--dataset-path"),
        ("estimate --config x.toml --word-size 4", "--world-size"),
        ("resize x --nprc 3", "--nproc"),
        ("report x --fail-abov 1", "--fail-above"),
        ("convert to-hf x y --dtyp bf16", "--dtype"),
        ("convert to-hff x y", "to-hf"),
        ("trian --config x.toml", "train"),
    ],
)
def test_a_mistyped_option_or_command_is_suggested(
    arguments: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) != 0
    err = capsys.readouterr().err
    assert f"Did you mean {meant} " in err or f"Did you mean {meant}?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("launch --replicas 2 --config x.toml", "Those of `train` follow --."),
        ("launch --replicas 2 -- --nproc 2 --config x.toml", "give --nproc-per-replica"),
        ("launch --replicas 2 -- --nnodes 2 --config x.toml", "--nnodes is given after --"),
    ],
)
def test_launch_says_where_arguments_belong(
    arguments: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert hint in capsys.readouterr().err


def test_a_key_without_its_section_is_no_mistyped_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--steps", "4", "--config=configs/llama3_debug.toml"]) == 1
    assert "Did you mean training.steps or validation.steps?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        ([], 2, ""),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        (["inspect", "--nonsense", "x"], 2, "unrecognized arguments: --nonsense"),
        (["convert"], 2, "KIND"),
        (["train", "--help", "chekpoint"], 1, "Did you mean [checkpoint]?"),
        (["train", "llama.toml"], 1, "write --config llama.toml"),
        (["train", "--nproc", "0", "--config", "x.toml"], 1, '--nproc is "0"'),
        (["train", "--nproc=two", "--config", "x.toml"], 1, '--nproc is "two"'),
        (["train", "--nproc", "2", "--config", "x.toml"], 1, "x.toml"),
        (["train", "--nproc=2", "--spares=-1", "--config", "x.toml"], 1, '--spares is "-1"'),
        (["train", "--nproc=2", "--spares", "1", "--config", "x.toml"], 1, "x.toml"),
        (["train", "--nnodes=0", "--config", "x.toml"], 1, '--nnodes is "0"'),
        (["train", "--nnodes=2", "--config", "x.toml"], 1, "need --rdzv-endpoint"),
        (["train", "--rdzv-id=x", "--config", "x.toml"], 1, "need --rdzv-endpoint"),
        (["train", "--rdzv-endpoint=node0", "--config", "x.toml"], 1, "must be HOST:PORT"),
    ],
)
def test_an_invalid_command_line_is_one_line(
    arguments: list[str], status: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    err = capsys.readouterr().err
    assert error in err
    assert not error or len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--nproc=2", "--spares=1", "--nnodes=2"])
def test_nproc_under_torchrun_is_rejected(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", option, "--config=configs/llama3_debug.toml"]) == 1
    assert "torchrun has already started the processes" in capsys.readouterr().err


def test_a_machine_that_others_cannot_reach_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "a secret of the tests")
    # The only route is a loopback one, which the endpoint does not ask for.
    monkeypatch.setattr(
        "torchtitan_lite.cli.train_machines.address_for_others", lambda *_: "127.0.0.1"
    )
    command = ["train", "--nnodes=2", "--config=configs/llama3_debug.toml"]
    assert main([*command, "--rdzv-endpoint=10.0.0.9:29520"]) == 1
    assert "which other machines cannot reach" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_keys_and_choices(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("evaluate", "--replicas", "--parallelism.tensor_parallel_degree", "AdamW"):
        assert word in script


def test_bash_accepts_the_completion() -> None:
    script = call("completion", "bash").stdout
    probe = (
        f"{script}\nCOMP_WORDS=(torchtitan-lite tr); COMP_CWORD=1; COMP_LINE='torchtitan-lite tr'; "
        "COMP_POINT=18; $(complete -p torchtitan-lite | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True)
    assert "train" in done.stdout.split(), done.stderr


def test_sizes() -> None:
    assert (size("5GB"), size("1.5mb")) == (5 * 10**9, 1_500_000)


def test_launch_passes_on_what_follows_the_separator(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(
        "torchtitan_lite.cli.launch.run", lambda options, others: given.append(list(others)) or 0
    )
    assert main(["launch", "--replicas=2", "--", "--config=x.toml", "--", "--job.x=1"]) == 0
    assert given == [["--config=x.toml", "--", "--job.x=1"]]


@pytest.mark.parametrize("is_leader", [True, False])
def test_one_rank_prints_an_evaluation(is_leader: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    world = nullcontext(SimpleNamespace(is_leader=is_leader))
    monkeypatch.setattr("torchtitan_lite.cli.evaluate.start_mesh", lambda **_: world)
    monkeypatch.setattr("torchtitan_lite.cli.evaluate.evaluate", lambda *_: {"loss": 2.5})
    monkeypatch.setattr(
        "torchtitan_lite.cli.evaluate._print", lambda record, _: printed.append(record)
    )
    assert main(["evaluate", "folder", "--device=cpu"]) == 0
    assert printed == [{"loss": 2.5}] * is_leader


@pytest.mark.parametrize(("replicas", "error"), [(1, "there are 1 replicas"), (2, "")])
def test_a_quorum_of_all_replicas_is_possible(replicas: int, error: str) -> None:
    options = parser().parse_args(["launch", f"--replicas={replicas}", "--min-replicas=2"])
    context = pytest.raises(ConfigError, match=error) if error else nullcontext()
    with context:
        launch._check(options, [1])


@pytest.mark.parametrize(("steps", "number"), [(None, "5"), (5, "10")])
def test_a_launch_shows_how_to_resume_it(
    steps: int | None, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished one needs more steps."""
    plan: Any = SimpleNamespace(
        num_replicas=1, goodput_file=lambda number: tmp_path / "none", dump_folder=tmp_path
    )
    launcher: Any = SimpleNamespace(sample=list, finished_steps=steps)
    options: Any = SimpleNamespace(argv=["--replicas=1"])
    launch._print_end(plan, launcher, options, ["--training.steps=5"])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "Resume" in one]
    assert line.replace("=", " ").endswith(f"launch --replicas 1 -- --training.steps {number}")
