"""Inputs of the launcher: arguments, logs, metrics."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchtitan_lite.cli import launch, main
from torchtitan_lite.cli.rank_counts import main as check_config
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.outputs import PARTICIPATES, RECEIVES_STATE, STARTING
from torchtitan_lite.fault_tolerance.supervision.launcher import goodput
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import (
    LaunchPlan,
    dump_folder,
    training_plan,
)
from torchtitan_lite.fault_tolerance.supervision.logs import (
    ReplicaProgress,
    TorchftLogFilter,
    last_lines,
    mask_numbers,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh

CHATTER = b"2026-01-01T00:00:00.000 [INFO] [torchft::manager] - [Replica 0] start quorum"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "a.toml"
    path.write_text('[job]\ndump_folder = "from_file"\n')
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ("--config {}", "from_file"),
        ("--config={} --job.dump_folder=x", "x"),
        ("--job.dump-folder y --job.config_file {}", "y"),
        # The last of several values counts, and an option is not the value of another.
        ("--job.dump_folder x --job.dump_folder=y --config none.toml --config {}", "y"),
        ("a --job.dump_folder --config={}", "outputs"),
        ("--training.dump_folder x --job.dump_folder=a=b --config {}", "a=b"),
    ],
)
def test_dump_folder(arguments: str, folder: str, config: str) -> None:
    assert dump_folder(arguments.format(config).split()) == Path(folder)


@pytest.mark.parametrize("text", ["", "[training]\n", "job = 3\n", "\ufeff[job]\n"])
def test_dump_folder_by_default(text: str, config: str) -> None:
    Path(config).write_text(text, encoding="utf-8")
    assert dump_folder(["--config", config]) == Path("outputs")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--config FILE"),
        (["--config"], "cannot be read"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read: [Errno 2]"),
        (["--config", "x", "--fault_tolerance.replica-id=3"], "it is set for each replica"),
        (["--fault_tolerance.no_enable"], "it is set for each replica"),
        (["--config", "x", "--nproc-per-node=3"], "--nproc-per-node is given after --"),
        (["--config", "x", "--replicas", "3"], "--replicas is given after --"),
    ],
)
def test_unsupported_arguments(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        dump_folder(arguments)
    assert error in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("lighthouse", "module"),
    [
        ("builtin", " coordinator"),
        ("torchft", ".fault_tolerance.supervision.launcher.torchft_lighthouse"),
    ],
)
def test_plan(lighthouse: str, module: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Sequence[str]] = []

    def check(ranks: Sequence[int], arguments: Sequence[str]) -> str:
        """Check the config in this process, which has imported torch."""
        assert check_config([",".join(map(str, ranks)), "--", *arguments]) == 0
        checked.append(arguments)
        return "it has no snapshots"

    def planned(*more: str, log_dir: Path | None = None) -> LaunchPlan:
        return training_plan(
            ["--config", config, "--training.steps=3", *more],
            num_replicas=2,
            ranks=[4],
            num_spares=0,
            slots_file=None,
            regrow_after_s=600,
            lighthouse=lighthouse,
            min_replicas=2,
            max_restarts=1,
            max_restart_delay_s=30,
            grace_s=7.5,
            host="127.0.0.1",
            log_dir=log_dir,
            check=check,
        )

    plan = planned("--job.device=cpu")
    assert plan.resize_refusal == "it has no snapshots"
    suffix = " --fault_tolerance.lighthouse torchft" * (lighthouse == "torchft")
    own = (
        f"--config {config} --training.steps=3 --job.device=cpu --fault_tolerance.enable true "
        f"--fault_tolerance.replica_id {{}} --fault_tolerance.group_size 2{suffix}"
    )
    # The first replica stands for all.
    assert [" ".join(one) for one in checked] == [own.format(0)]
    program, degree = (
        f"{sys.executable} -m torchtitan_lite",
        "--parallelism.pipeline_parallel_degree",
    )
    assert " ".join(plan.process_command(1)) == f"{program} train {own.format(1)}"
    pipelined = RunMesh(2, (f"{degree}=2",))
    whole = RunMesh(2, (f"{degree}=2", f"{degree}=1", "--a.b=2"))
    command = plan.check_command(pipelined)
    assert command[2:5] == ["torchtitan_lite.cli.resize_check", pipelined.to_text(), "--"]
    assert " ".join(command[5:]) == own.format(0)
    options = "--bind a:1 --min-replicas 2 --join-timeout-ms 2000"
    assert " ".join(plan.lighthouse_command("a:1")) == f"{program}{module} {options}"
    # torchft's lighthouse accepts no departures.
    assert (plan.notifier_command is not None) == (lighthouse == "builtin")
    assert plan.is_pipelined(pipelined) and not plan.is_pipelined(RunMesh(4))
    assert plan.log_folder(1) == Path("from_file/launch_logs/replica_001")
    assert plan.metrics_file(0) == Path("from_file/replica_000/metrics.jsonl")
    assert not plan.uses_gpus and not plan.waits_for_folder
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    plan = planned(f"{degree}=2", "--job.when_in_use=wait", log_dir=Path("logs"))
    assert plan.is_pipelined(RunMesh(4)) and not plan.is_pipelined(whole)
    assert plan.uses_gpus and plan.waits_for_folder
    assert plan.log_folder(0) == Path("logs/replica_000")
    # Before anything starts.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    with pytest.raises(ConfigError, match="need 8 GPUs, but this machine has 7"):
        planned()


@pytest.mark.parametrize(
    ("status", "output", "error"),
    [
        (0, "a warning", None),
        (2, "too few layers\n", "too few layers"),
        (2, "", "torchtitan_lite.cli.rank_counts ended with 2."),
    ],
)
def test_a_process_checks_the_configuration_for_all_numbers_of_ranks(
    status: int, output: str, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, capture_output: bool, text: bool) -> object:
        assert command[-5:] == ["1,2", "--", "--config", "x", "--steps=3"]
        assert capture_output and text
        answer = 'a line\n{"refusal": "it has no snapshots"}\n'
        return subprocess.CompletedProcess(command, status, answer, output)

    monkeypatch.setattr(launch.subprocess, "run", run)
    with nullcontext() if error is None else pytest.raises(ConfigError, match=f"^{error}$"):
        refusal = launch.check_ranks([1, 2], ["--config", "x", "--steps=3"])
        assert refusal == "it has no snapshots"


def plan_with(environment: dict[str, str]) -> LaunchPlan:
    return LaunchPlan(
        num_replicas=1,
        ranks=[1],
        process_command=lambda replica: [],
        lighthouse_command=lambda address: [],
        dump_folder=Path(),
        log_dir=Path(),
        environment=environment,
    )


def test_environment() -> None:
    variables = {"RANK": "3", "PATH": "/bin", "OMP_NUM_THREADS": "8"}
    plan = plan_with(variables)
    environment = plan.base_environment()
    assert "RANK" not in environment and environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "8"
    assert len(environment["TORCHTITAN_LITE_TOKEN"]) == 2 * 16
    variables["TORCHTITAN_LITE_TOKEN"] = "a secret of the user"
    kept = plan_with(variables).base_environment()
    assert kept["TORCHTITAN_LITE_TOKEN"] == "a secret of the user"


def test_filter_takes_whole_lines() -> None:
    stream = b"one\n" + CHATTER + b"\ntwo\nthr"
    actual, filter_ = [], TorchftLogFilter()
    for place in range(0, len(stream), 7):
        actual += filter_.feed(stream[place : place + 7])
    assert actual == [b"one", b"two"]


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\na\n\nb  \n" + CHATTER + b"\n\xff end")
    assert last_lines(log, 3) == ["a", "b", "\N{REPLACEMENT CHARACTER} end"]
    assert last_lines(tmp_path / "nowhere", 3) == []


def test_common_part_of_lines() -> None:
    first, second = "12:00:01 port 4000 at 0xab12", "12:00:02 port 4711 at 0xfe"
    assert mask_numbers(first) == mask_numbers(second) == "#:#:# port # at #"


def test_an_invalid_command_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "--replicas": [],
        "--replicas is 0": ["--replicas=0"],
        "lower it, or start more": ["--replicas=2", "--min-replicas=3"],
        "end the command with -- --config": ["--replicas=2"],
    }
    for message, arguments in wrong.items():
        assert main(["launch", *arguments]) == 2
        output = capsys.readouterr().err
        assert message in output and len(output.splitlines()) == 1


def step(number: int) -> str:
    return json.dumps({"step": number, "loss": 1.0}) + "\n"


def test_progress_excludes_records_of_earlier_generations(tmp_path: Path) -> None:
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "rank_0.log"
    metrics.write_text(step(1) + step(2) + step(3))
    progress = ReplicaProgress(metrics, log)
    progress.update()
    assert progress.last_step is None
    # The trainer resumes at step 1.
    (tmp_path / "new").write_text(step(1))
    (tmp_path / "new").rename(metrics)
    progress.update()
    assert progress.last_step is None
    with metrics.open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 1, "loss": 0}) + "\n" + step(2)[:5])
    progress.update()
    assert progress.last_step is None
    with metrics.open("a") as file:
        file.write(step(2)[5:])
    progress.update()
    assert progress.last_step is not None and progress.last_step["step"] == 2


def test_progress_sees_healing(tmp_path: Path) -> None:
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "rank_0.log"
    progress = ReplicaProgress(metrics, log)
    log.write_text(f"{STARTING}\tcompiling\n")
    progress.update()
    assert progress.stage == "compiling"
    with log.open("a") as file:
        file.write(f"12:00:00 {STARTING}4\n12:00:00 {RECEIVES_STATE}, at sample 4.\n")
    progress.update()
    assert progress.is_healing and progress.stage == "4"
    with log.open("a") as file:
        file.write(f"12:00:01 {PARTICIPATES} in the quorum.\n")
    progress.update()
    assert not progress.is_healing
    with log.open("a") as file:
        file.write(f"12:00:02 {RECEIVES_STATE}\n")
    progress.update()
    assert progress.is_healing
    metrics.write_text("no JSON\n" + step(5))
    progress.update()
    assert not progress.is_healing and progress.last_step == {"step": 5, "loss": 1.0}


def test_progress_ignores_step_times_that_are_not_finite(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = ReplicaProgress(metrics, tmp_path / "rank_0.log")
    lines = ['{"event": "start", "step": 0, "steps": 14}']
    for taken_s in ("1e999", "NaN", "-Infinity", "2.0", "Infinity"):
        lines.append(f'{{"step": 4, "loss": 1.0, "step_time_s": {taken_s}}}')
    metrics.write_text("\n".join(lines) + "\n")
    progress.update()
    assert progress.time_left_s == 20.0


def test_goodput_is_read_as_finite_floats(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    path.write_text(
        '{"version": 1, "entries": [[1]], "goodput": 0.5, "wall_s": 10, "lost_s": 0, '
        '"compute_s": 5.0, "odd_s": "1"}'
    )
    actual = goodput.read(path)
    assert actual is not None
    assert actual == {"goodput": 0.5, "wall_s": 10.0, "lost_s": 0.0, "compute_s": 5.0}
    assert goodput.line(actual) == "goodput 50.0% of 10 s, 0.0 s of work lost"
    more = {**actual, "between_s": 3.0, "start_s": 2.0, "quorum_s": 0.04}
    rows = [" ".join(row.split()) for row in goodput.table(more)]
    assert rows == [
        "Goodput 50.0% of 0:10 since the first start",
        "compute 5.0 s 50.0%",
        "between steps 3.0 s 30.0%",
        "startup 2.0 s 20.0%",
    ]


@pytest.mark.parametrize("key", ["goodput", "wall_s", "lost_s", "compute_s"])
@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "1" + "0" * 400, "1" + "0" * 5000])
def test_non_finite_goodput_is_damaged(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    values = {"goodput": "0.5", "wall_s": "10", "lost_s": "0", key: value}
    path.write_text("{" + ", ".join(f'"{k}": {v}' for k, v in values.items()) + "}")
    assert goodput.read(path) is None


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1]", "3", "[" * 100_000, '{"goodput": 0.5}'),
        '{"goodput": "0.5", "wall_s": 1, "lost_s": 0}',
        '{"goodput": true, "wall_s": 1, "lost_s": 0}',
    ],
)
def test_a_damaged_goodput_file_is_ignored(content: str, tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    path.write_text(content)
    assert goodput.read(path) is None
    assert goodput.read(tmp_path / "nowhere") is None
