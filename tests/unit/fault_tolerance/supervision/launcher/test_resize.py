"""The number of ranks per replica when slots change."""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.harness.launch import SMALL
from torchtitan_lite.cli import main
from torchtitan_lite.cli import resize_check as resize_check_command
from torchtitan_lite.cli.rank_counts import check_rank_counts
from torchtitan_lite.cli.train_agents import resize_check
from torchtitan_lite.cli.train_options import checked_config, split_options
from torchtitan_lite.config import check_resize_arguments
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import (
    ResizePolicy,
    SlotsFile,
    parse_ranks,
    parse_slots,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import replica_arguments
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    RunMesh,
)
from torchtitan_lite.training.run_config import load_config


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2", (2,)), ("1:3", (1, 2, 3)), ("4,1,2", (1, 2, 4)), ("3:3", (3,)), ("8,8", (8,))],
)
def test_numbers_of_ranks(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranks(text) == numbers


@pytest.mark.parametrize("text", ["", "x", "0", "0:2", "2:1", "1:", ":2", "1:2:3", "1,,2", "-1"])
def test_invalid_numbers_of_ranks(text: str) -> None:
    with pytest.raises(ConfigError, match="--nproc-per-replica"):
        parse_ranks(text)


def policy(*allowed: int) -> ResizePolicy:
    return ResizePolicy(allowed, 2, regrow_after_s=100)


def target(made: ResizePolicy, slots: dict[int, int], now_s: float) -> tuple[int, str]:
    """Return the number of ranks that each replica should have, and what limits it."""
    given, reason = made.available(slots, now_s)
    return made.largest(given), reason


def test_all_replicas_have_the_ranks_of_the_smallest() -> None:
    made = policy(1, 2, 4)
    assert target(made, {}, 0) == (4, "")
    assert target(made, {0: 4, 1: 9}, 0) == (4, "")
    assert target(made, {1: 3}, 0) == (2, "replica 1 has slots for 3")
    assert target(made, {0: 2, 1: 1, 7: 0}, 0)[0] == 1
    # Fewer than the minimum: the minimum is tried.
    assert target(policy(2, 4), {0: 1}, 0)[0] == 2


def test_three_deaths_of_one_rank_remove_its_slot_for_a_while() -> None:
    made = policy(1, 2, 4)
    for now_s in (0, 10):
        made.record_failure(1, 3, 4, now_s)
    assert target(made, {}, 10) == (4, "")
    made.record_failure(1, 3, 4, 20)
    assert target(made, {}, 20) == (2, "a rank of replica 1 failed 3 times in a row")
    assert target(made, {}, 119)[0] == 2
    assert target(made, {}, 121) == (4, "")
    # The trial failed: the next one is later.
    for now_s in (130, 140, 150):
        made.record_failure(1, 3, 4, now_s)
    assert target(made, {}, 349)[0] == 2
    assert target(made, {}, 351)[0] == 4


@pytest.mark.parametrize(("gap_s", "is_lost"), [(120, True), (121, False)])
def test_deaths_with_much_time_between_them_remove_no_slot(gap_s: int, is_lost: bool) -> None:
    made = policy(1, 2)
    for now_s in (0, 120, 120 + gap_s):
        made.record_failure(1, 1, 2, now_s)
    assert target(made, {}, 120 + gap_s)[0] == (1 if is_lost else 2)


def test_unrelated_deaths_remove_no_slot() -> None:
    made = policy(1, 2)
    for now_s, rank in [(0, 1), (10, 0), (20, 1), (30, 1), (200, 1), (210, 1)]:
        made.record_failure(1, rank, 2, now_s)
        made.record_failure(0, rank, 2, now_s + 200 * rank)
    assert target(made, {}, 410) == (2, "")
    # The replica has the minimum already.
    for _ in range(9):
        made.record_failure(1, 0, 1, 300)
    assert target(made, {}, 300) == (2, "")


@pytest.mark.parametrize(
    ("content", "slots"),
    [
        (b'{"0": 2, "1": 0}', {0: 2, 1: 0}),
        (b"{}", {}),
        (b'{"0": 2', None),
        (b'{"0": -1}', None),
        (b'{"0": true}', None),
        (b'{"0": 1.5}', None),
        (b'{"a": 1}', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"[" * 60000, None),
    ],
)
def test_slots(content: bytes, slots: dict[int, int] | None) -> None:
    assert parse_slots(content) == slots


def test_a_missing_or_malformed_file_changes_nothing(tmp_path: Path) -> None:
    path, output = tmp_path / "slots", []
    file, now_s = SlotsFile(path, output.append), time.monotonic()
    assert file.read(now_s) == {} and len(output) == 1
    path.write_text('{"0": 1}')
    assert file.read(now_s + 1) == {0: 1}
    for number, content in enumerate(['{"0": ', None, '{"0": 2, "1": 2}']):
        path.write_text(content) if content is not None else path.unlink()
        expected = {0: 2, 1: 2} if number == 2 else {0: 1}
        assert file.read(now_s + 2 + number) == expected
        assert file.read(now_s + 2.5 + number) == expected
    # Logged once each, although the file was read twice.
    assert len(output) == 3


def config_with(*more: str):
    path = Path(SMALL[0].removeprefix("--config="))
    return load_config(path, [*SMALL[1:], "--checkpoint.enable=true", *more])


def test_a_config_that_cannot_change_its_ranks_is_rejected() -> None:
    check_rank_counts(config_with(), [1, 2])
    with pytest.raises(ConfigError, match="data_parallel_shard_degree"):
        check_rank_counts(config_with("--parallelism.data_parallel_shard_degree=2"), [1])
    wrong = [
        ("--training.global_batch_size=-1", "global_batch_size = -1 follows the mesh"),
        ("--checkpoint.load_only=true", "resume from checkpoints"),
        ("--checkpoint.load_step=3", "checkpoint.load_step or exclude_from_loading"),
        ("--parallelism.data_parallel_shard_degree=2", "With 1 rank each: "),
        ("--training.local_batch_size=4", "With 2 ranks each: "),
    ]
    for option, message in wrong:
        with pytest.raises(ConfigError) as raised:
            check_rank_counts(config_with(option), [1, 2])
        assert message in str(raised.value), option


@pytest.mark.matrix
def test_the_launcher_rejects_it_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--replicas=1", "--nproc-per-replica=1:2", f"--slots-file={tmp_path / 'slots'}"]
    arguments = [*SMALL, "--training.global_batch_size=-1", f"--job.dump_folder={tmp_path / 'run'}"]
    assert main(["launch", *own, "--", *arguments]) == 2
    assert "global_batch_size = -1 follows the mesh" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["launch", "--replicas=1", "--slots-file=x", "--", *arguments]) == 2
    assert "--slots-file has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--parallelism.tensor_parallel_degree=2"],
        ["--parallelism.tensor-parallel-degree", "2"],
        ["--parallelism.data_parallel_shard_degree", "-1", "--training.local_batch_size=1"],
    ],
)
def test_a_request_to_resize_may_change_the_mesh(arguments: list[str]) -> None:
    check_resize_arguments(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.steps=7"],
        ["--experimental.custom_import=os"],
        ["--", "--help"],
        ["--help"],
        ["-h"],
        ["--parallelism.pipeline_parallel_degree=2", "--config=other.toml"],
    ],
)
def test_a_request_to_resize_may_change_nothing_else(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="a resize changes"):
        check_resize_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), ""),
        (("--checkpoint.async_mode=disabled",), "it resumes from snapshots in shared memory"),
        (("--training.global_batch_size=3",), "global_batch_size"),
    ],
)
def test_an_agent_accepts_a_request_if_its_run_can_continue(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    options, given = split_options(
        [*SMALL, f"--job.dump_folder={tmp_path}", "--checkpoint.ram_interval=1",
         "--training.local_batch_size=1", *arguments]
    )  # fmt: skip
    config, _ = checked_config(given, 1)
    check = resize_check(given, options, config)
    request = ResizeRequest(mesh=RunMesh(2))
    with pytest.raises(ConfigError, match=error) if error else nullcontext():
        check(request)


@pytest.mark.parametrize(
    ("mesh", "refusal"),
    [("2", ""), ("2 --training.steps=9", "a resize changes"), ("3", "data_parallel_shard_degree")],
)
def test_a_process_checks_a_resize_for_the_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, refusal: str
) -> None:
    arguments = [*SMALL, f"--job.dump_folder={tmp_path}", "--checkpoint.ram_interval=1",
                 "--training.local_batch_size=1", *replica_arguments(0, 2)]  # fmt: skip
    if mesh == "3":
        arguments.append("--parallelism.data_parallel_shard_degree=2")
    assert resize_check_command.main([mesh, "--", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)["refusal"]
    assert refusal in answer and bool(answer) == bool(refusal)
