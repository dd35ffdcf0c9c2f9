"""The launcher's processes are killed in various ways; no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.unit.fault_tolerance.supervision.launcher.fakes import fake
from torchtitan_lite.core.errors import DIVERGED, MACHINE_FAULT

TIMEOUT_S = 120
AT_ONCE_S = 5
"""Limit for actions that take a tenth of a second on an idle machine."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")


@contextmanager
def launched(folder: Path, mode: str, *numbers: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run the launcher with fake programs and its output in FOLDER/output; kill everything at the
    end."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            fake("launch", folder, mode, *numbers),
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in pids(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids(folder: Path, kind: str = "*", *, name: str = "*") -> list[int]:
    """Return the running processes, in the order of their starts."""
    files = sorted(folder.glob(f"pids/{kind}-{name}-*"), key=lambda path: path.stat().st_mtime_ns)
    actual = [int(path.name.rpartition("-")[2]) for path in files]
    return [pid for pid in actual if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> float:
    """Block until the condition holds, and return the elapsed time in seconds."""
    return launch.wait_until(condition, TIMEOUT_S)


def times_printed(folder: Path, text: str) -> int:
    """Return how often the launcher printed this."""
    return (folder / "output").read_text().count(text)


def until_training(folder: Path, *, times: int = 1) -> None:
    """Block until the launcher has seen two replicas of two ranks train `times` times each."""
    wait_until(lambda: len(pids(folder, "rank")) == 4)
    wait_until(
        lambda: all(times_printed(folder, f"replica {n}: training") == times for n in range(2))
    )


def output_of(process: subprocess.Popen[bytes], folder: Path, status: int) -> str:
    """Return the launcher's complete output."""
    process.wait(TIMEOUT_S)
    output = (folder / "output").read_text()
    assert process.returncode == status, output
    return output


def test_a_dead_rank_is_replaced_and_the_others_keep_their_processes(tmp_path: Path) -> None:
    with launched(tmp_path, "run") as process:
        until_training(tmp_path)
        others = [*pids(tmp_path, "rank", name="0.*"), *pids(tmp_path, "rank", name="1.0")]
        os.kill(pids(tmp_path, "rank", name="1.1")[0], signal.SIGKILL)
        left = tmp_path / "left"
        message = ["127.0.0.1:4321", "replica_00001"]
        assert (
            wait_until(lambda: left.exists() and left.read_text().split()[:2] == message)
            < AT_ONCE_S
        )
        wait_until(lambda: times_printed(tmp_path, "replica 1: training") == 2)
        wait_until(lambda: len(pids(tmp_path, "rank", name="1.1")) == 1)
        assert all(map(is_alive, others))
        process.send_signal(signal.SIGTERM)
        output = output_of(process, tmp_path, 0)
    assert "replica 1: failed, rank 1: killed by SIGKILL" in output
    assert "replica 1: restarts in 0.1 s" in output
    for generation in ("generation_00", "generation_01"):
        log = tmp_path / "logs" / "replica_001" / generation / "rank_1.log"
        assert log.read_text() == "rank 1 with http://127.0.0.1:4321\n"
    assert not pids(tmp_path)


def test_a_replica_that_others_ask_to_stop_is_started_again(tmp_path: Path) -> None:
    with launched(tmp_path, "run", 1, 2) as process:
        wait_until(lambda: times_printed(tmp_path, "replica 0: training"))
        wait_until(lambda: len(pids(tmp_path, "rank")) == 2)
        for pid in pids(tmp_path, "rank"):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: times_printed(tmp_path, "replica 0: training") == 2)
        process.send_signal(signal.SIGINT)
        output = output_of(process, tmp_path, 0)
    assert "replica 0: saved and left, because a process other than the launcher" in output
    assert output.count("replica 0: left at step") == 1
    assert not pids(tmp_path)


def test_a_dead_launcher_ends_everything(tmp_path: Path) -> None:
    with launched(tmp_path, "run") as process:
        until_training(tmp_path)
        wait_until(lambda: len(pids(tmp_path)) == 6)
        process.kill()
        assert wait_until(lambda: not pids(tmp_path)) < AT_ONCE_S


def test_a_dead_lighthouse_restarts_at_its_port_and_sigterm_lets_ranks_save(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, "run", 2, 2, 3, 90) as process:
        until_training(tmp_path)
        ranks = pids(tmp_path, "rank")
        shown = {int(path.read_text()) for path in tmp_path.glob("logs/replica_*/rank_*.pid")}
        assert shown == set(ranks)
        os.kill(pids(tmp_path, "lighthouse")[0], signal.SIGKILL)
        log = tmp_path / "logs" / "lighthouse.log"
        wait_until(lambda: log.read_text() == "listening on 127.0.0.1:4321\n" * 2)
        assert all(map(is_alive, ranks))
        process.send_signal(signal.SIGTERM)
        output = output_of(process, tmp_path, 0)
    assert output.count("listening on 127.0.0.1:4321") == 2
    assert len(list(tmp_path.glob("saved-*"))) == 4
    for number in range(2):
        # The steps that it has taken while it was asked to leave are shown, too.
        records = (tmp_path / f"replica_{number:03d}" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(records[-1])["step"]
        assert output.count(f"replica {number}: left at step {last}\n") == 1
    for pid in ranks:
        assert output.count(f"is process {pid}") == 1
    assert not pids(tmp_path)
    assert not list(tmp_path.glob("logs/replica_*/rank_*.pid"))


def test_a_replica_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, "stubborn", 2, 2, 3, 0.5) as process:
        until_training(tmp_path)
        process.send_signal(signal.SIGTERM)
        output = output_of(process, tmp_path, 1)
    assert output.count("killed before it had left") == 2
    assert not pids(tmp_path)


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "stubborn", 2, 2, 3, 60) as process:
        until_training(tmp_path)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: times_printed(tmp_path, "save and leave"))
        assert len(pids(tmp_path, "rank")) == 4
        process.send_signal(signal.SIGINT)
        assert wait_until(lambda: not pids(tmp_path)) < AT_ONCE_S
        output_of(process, tmp_path, 1)


@pytest.mark.matrix
def test_all_finish(tmp_path: Path) -> None:
    with launched(tmp_path, "short") as process:
        output = output_of(process, tmp_path, 0)
    assert output.count(": finished") == 2
    assert not pids(tmp_path)


def test_an_invalid_setting_fails_early_and_is_shown(tmp_path: Path) -> None:
    with launched(tmp_path, "wrong", 1, 2) as process:
        output = output_of(process, tmp_path, 1)
    assert "Replica 0 is given up: rank 0: training.steps is wrong." in output
    assert "generation_00/rank_0.log ends with:\n    rank 0 with http" in output
    assert output.rstrip().endswith("training.steps is wrong")
    assert output.count("started") == 1
    assert not pids(tmp_path)


def test_an_error_that_repeats_before_any_progress_ends_the_job(tmp_path: Path) -> None:
    with launched(tmp_path, "failing", 1, 2) as process:
        output = output_of(process, tmp_path, 1)
    assert ": it failed 2 times in the same way before it made progress." in output
    assert "rank_0.log ends with:\n" in output and "    ValueError: at" in output
    assert output.count("started") == 2
    assert not pids(tmp_path)


def test_a_process_that_cannot_start_is_shown(tmp_path: Path) -> None:
    with launched(tmp_path, "unstartable", 1, 1) as process:
        output = output_of(process, tmp_path, 1)
    assert "rank 0: exit status 1: it failed 2 times in the same way" in output
    assert "processes.log ends with:\n    No module named 'a'" in output
    assert not pids(tmp_path)


@pytest.mark.matrix
def test_a_replica_that_fails_repeatedly_ends_the_job(tmp_path: Path) -> None:
    with launched(tmp_path, "breaks", 2, 2, 1) as process:
        output = output_of(process, tmp_path, 1)
    assert "rank 1: RuntimeError: the device is gone: it failed 2 times in a row." in output
    assert "RuntimeError: the device is gone" in output
    assert not pids(tmp_path)


def num_starts(folder: Path, rank: str) -> int:
    return len(list(folder.glob(f"pids/rank-{rank}-*")))


def ranks_are(folder: Path, *wanted: str) -> bool:
    """Return whether exactly these ranks run, each named REPLICA.RANK. Others may be about to start
    or exit, so also check the number of starts."""
    return all(len(pids(folder, "rank", name=name)) == 1 for name in wanted) and len(
        pids(folder, "rank")
    ) == len(wanted)


@pytest.mark.matrix
def test_replicas_resize_when_slots_change(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text('{"1": 2}')
    with launched(tmp_path, "slots") as process:
        until_training(tmp_path)
        slots.write_text('{"1": 1')
        time.sleep(0.6)
        assert ranks_are(tmp_path, "0.0", "0.1", "1.0", "1.1")
        slots.write_text('{"1": 1}')
        wait_until(lambda: ranks_are(tmp_path, "0.0", "1.0"))
        assert len(list(tmp_path.glob("left-*"))) == 4
        slots.write_text("{}")
        until_training(tmp_path, times=3)
        process.send_signal(signal.SIGTERM)
        output = output_of(process, tmp_path, 0)
    assert "slots is not of the form" in output
    where = "in their processes"
    assert f"all replicas resize to 1 rank each {where}: replica 1 has slots for 1" in output
    assert f"all replicas resize to 2 ranks each {where}: slots are available again" in output
    assert "left to resize" not in output and "failed" not in output
    assert not pids(tmp_path)


@pytest.mark.matrix
def test_a_slot_whose_rank_keeps_dying_is_removed_and_retried(tmp_path: Path) -> None:
    with launched(tmp_path, "dies", 2, 2, 20) as process:
        # On a busy machine three deaths and restarts take a minute.
        launch.wait_until(
            lambda: times_printed(tmp_path, "all replicas resize to 1 rank each"), 150
        )
        launch.wait_until(
            lambda: times_printed(tmp_path, "all replicas resize to 2 ranks each"), 150
        )
        wait_until(lambda: len(pids(tmp_path, "rank")) > 2)
        process.send_signal(signal.SIGTERM)
        output = output_of(process, tmp_path, 0)
    first, grown = output.split("all replicas resize to 1 rank each: ")[:2]
    assert first.count("replica 1: failed, rank 1: killed by SIGKILL") >= 3
    assert grown.startswith("a rank of replica 1 failed 3 times in a row")
    assert "all replicas resize to 2 ranks each" in grown
    assert not pids(tmp_path)


def test_a_replica_that_does_not_leave_to_resize_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("{}")
    with launched(tmp_path, "slots-stubborn", 2, 2, 3, 0.5) as process:
        until_training(tmp_path)
        (tmp_path / "slots").write_text('{"0": 1}')
        wait_until(lambda: num_starts(tmp_path, "0.0") == num_starts(tmp_path, "1.0") == 2)
        assert ranks_are(tmp_path, "0.0", "1.0")
        why = "resizing in their processes was not possible: it has no snapshots"
        assert times_printed(tmp_path, why)
        process.kill()
        wait_until(lambda: not pids(tmp_path))


@pytest.mark.parametrize(
    ("status", "others"),
    [(DIVERGED, "left"), pytest.param(MACHINE_FAULT, "finished", marks=pytest.mark.matrix)],
)
def test_a_diverged_run_ends_and_a_faulty_machine_is_excluded(
    tmp_path: Path, status: int, others: str
) -> None:
    with launched(tmp_path, str(status)) as process:
        output = output_of(process, tmp_path, 1)
    why = {DIVERGED: "the training has diverged", MACHINE_FAULT: "its machine is at fault"}[status]
    assert f"Replica 1 is given up: rank 0: exit status {status}: {why}. /" in output
    assert output.count("started") == 2
    assert f"replica 0: {others}" in output
    assert not pids(tmp_path)


def test_only_writers_outlive_their_trainer(tmp_path: Path) -> None:
    with launched(tmp_path, "writer", 1, 2) as process:
        wait_until(lambda: pids(tmp_path, "writer") and len(pids(tmp_path, "rank")) == 2)
        (writer,), (stray,) = pids(tmp_path, "writer"), pids(tmp_path, "stray")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(list(tmp_path.glob("saved-*"))) == 2)
        wait_until(lambda: times_printed(tmp_path, "waiting for checkpoint writers"))
        wait_until(lambda: not is_alive(stray))
        assert is_alive(writer)
        (tmp_path / "go").touch()
        output_of(process, tmp_path, 0)
    assert (tmp_path / "durable").exists()
    assert not is_alive(writer)
    assert not pids(tmp_path)


def test_writers_outlive_the_launcher(tmp_path: Path) -> None:
    with launched(tmp_path, "writer", 1, 2) as process:
        wait_until(lambda: pids(tmp_path, "writer") and len(pids(tmp_path, "rank")) == 2)
        process.kill()
        assert wait_until(lambda: not pids(tmp_path, "rank")) < AT_ONCE_S
        assert pids(tmp_path, "writer")
        (tmp_path / "go").touch()
        wait_until((tmp_path / "durable").exists)
