"""The launcher's status display."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from torchtitan_lite.fault_tolerance.supervision.launcher.lighthouse_process import (
    LighthouseProcess,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import Replica, ReplicaState
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import (
    LiveTable,
    PlainLines,
    RecordedView,
    describe,
    status_table,
)
from torchtitan_lite.fault_tolerance.supervision.logs import ReplicaProgress

RECORD = {"step": 12, "loss": 3.14159, "tokens_per_second": 12345.6, "num_replicas": 2}


def never(*args: Any) -> NoReturn:
    raise AssertionError("nothing is started here")


def replica(
    number: int, state: ReplicaState, record: dict[str, Any] | None, folder: Path
) -> Replica:
    made = Replica(
        number,
        max_ranks=1,
        folder=folder,
        metrics=folder / "metrics.jsonl",
        environment={},
        on_failure=never,
        report_event=print,
        report_diagnosis=print,
    )
    made.state, made.progress = state, ReplicaProgress(folder / "metrics.jsonl", folder / "log")
    made.progress.last_step = record
    made.last_event = f"event [{number}]"
    return made


@pytest.fixture
def lighthouse(tmp_path: Path) -> LighthouseProcess:
    log = tmp_path / "lighthouse.log"
    return LighthouseProcess(
        lambda address: [],
        {},
        host="127.0.0.1",
        log=log,
        max_restarts=1,
        report_event=print,
        report_diagnosis=print,
    )


def test_words(tmp_path: Path) -> None:
    training = replica(0, ReplicaState.TRAINING, RECORD, tmp_path)
    assert describe(training) == "step 12 loss 3.1416 12,346 tokens/s 2 replicas"
    # A non-finite loss is null in the metrics.
    assert "loss  12" in describe(
        replica(0, ReplicaState.TRAINING, {**RECORD, "loss": None}, tmp_path)
    )
    assert describe(replica(0, ReplicaState.HEALING, RECORD, tmp_path)) == "healing"
    assert describe(replica(0, ReplicaState.RESTARTING, None, tmp_path)) == "restarting in 0 s"


def test_the_table_has_a_row_per_replica(tmp_path: Path, lighthouse: LighthouseProcess) -> None:
    replicas = [
        replica(0, ReplicaState.TRAINING, RECORD, tmp_path),
        replica(1, ReplicaState.FINISHED, None, tmp_path),
    ]
    replicas[0].rank_pids = {0: 4242, 1: 4243}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(status_table(replicas, lighthouse, 0.0, 120))
    rows = [" ".join(line.split()) for line in captured.get().splitlines() if line.strip()]
    assert rows[2] == "replica 0 training 4242 +1 12 3.1416 12,346 0 event [0]"
    assert rows[3] == "replica 1 finished 0 event [1]"
    assert rows[4] == "lighthouse waiting 0"


def test_the_lighthouse_starts_listens_and_stops(tmp_path: Path) -> None:
    code = "import time; print('listening on h:7', flush=True); time.sleep(60)"
    lighthouse = LighthouseProcess(
        lambda address: [sys.executable, "-c", code],
        dict(os.environ),
        host="127.0.0.1",
        log=tmp_path / "lighthouse.log",
        max_restarts=2,
        report_event=print,
        report_diagnosis=print,
    )
    states = [lighthouse.state]

    def follow(until: str) -> None:
        deadline_s = time.monotonic() + 30
        while states[-1] != until and time.monotonic() < deadline_s:
            lighthouse.poll(time.monotonic())
            if lighthouse.state != states[-1]:
                states.append(lighthouse.state)

    lighthouse.start()
    follow("listening")
    assert lighthouse.pid is not None
    os.kill(lighthouse.pid, signal.SIGKILL)
    follow("down")
    follow("listening")
    lighthouse.kill()
    assert [*states, lighthouse.state] == [
        *("waiting", "starting", "listening"),
        *("down", "starting", "listening", "stopped"),
    ]
    assert lighthouse.descriptors == []
    # It stays down if it is killed before it has started again.
    lighthouse.start()
    assert lighthouse.pid is not None
    os.kill(lighthouse.pid, signal.SIGKILL)
    follow("down")
    lighthouse.kill()
    lighthouse.poll(time.monotonic() + 100)
    assert lighthouse.state == "stopped"


def test_the_last_table_shows_the_end(
    tmp_path: Path, lighthouse: LighthouseProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    view = LiveTable()
    one = replica(0, ReplicaState.LEAVING, RECORD, tmp_path)
    assert one.progress is not None
    view.update([one], lighthouse)
    # Within the time between two drawings.
    one.progress.last_step, one.state = {**RECORD, "step": 13}, ReplicaState.STOPPED
    view.close()
    last = capsys.readouterr().out.rpartition("replica 0")[2].split()
    assert last[:2] == ["stopped", "13"]


def test_an_event_is_printed_and_the_table_drawn_again_at_once(
    tmp_path: Path,
    lighthouse: LighthouseProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, drawn = LiveTable(), []
    monkeypatch.setattr(view, "_draw", drawn.append)
    one = replica(0, ReplicaState.TRAINING, RECORD, tmp_path)
    for _ in range(2):
        view.update([one], lighthouse)
    assert len(drawn) == 1
    view.report_event("replica 0: failed, [rank 1]")
    view.update([one], lighthouse)
    assert len(drawn) == 2
    assert "replica 0: failed, [rank 1]" in capsys.readouterr().out
    view.close()


@pytest.mark.parametrize("width", [80, 99, 100, 119, 120, 200])
def test_the_table_fits_the_terminal(
    width: int, tmp_path: Path, lighthouse: LighthouseProcess
) -> None:
    record = {"step": 100_000, "loss": 11.5, "tokens_per_second": 1_234_567, "num_replicas": 2}
    training = replica(0, ReplicaState.TRAINING, record, tmp_path)
    assert training.progress is not None
    training.progress.total_steps = 300_000
    training.rank_pids = dict.fromkeys(range(8), 4_194_303)
    starting = replica(1, ReplicaState.STARTING, None, tmp_path)
    assert starting.progress is not None
    starting.progress.stage = "building model"
    training.last_event = "12:00:00 failed, " + "x" * 200
    console = Console(width=width)
    with console.capture() as captured:
        console.print(status_table([training, starting], lighthouse, 0.0, width))
    text = captured.get()
    numbers = ("100000/300000", "11.5000", "1,234,567", "4194303")
    for words in ("replica 0", *numbers, "building model"):
        assert words in text
    assert max(map(len, text.splitlines())) <= width
    assert len([line for line in text.splitlines() if line.strip()]) == 5


def test_lines_are_printed_only_while_a_replica_trains(
    tmp_path: Path, lighthouse: LighthouseProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    view = PlainLines()
    away = replica(1, ReplicaState.RESTARTING, None, tmp_path)
    view.update([away], lighthouse)
    assert not capsys.readouterr().out
    for _ in range(2):
        view.update([replica(0, ReplicaState.TRAINING, RECORD, tmp_path), away], lighthouse)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("2 replicas; replica 1: restarting in 0 s")


def test_events_are_recorded_with_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch_logs" / "events.jsonl"
    before_s = time.time()
    for _ in range(2):
        view = RecordedView(PlainLines(), path)
        view.report_event('replica 1: failed, "rank 0"')
        view.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    texts = ["launcher started", 'replica 1: failed, "rank 0"']
    assert [line["text"] for line in lines] == texts * 2
    assert before_s <= lines[0]["time"] <= lines[1]["time"] <= time.time()
    assert capsys.readouterr().out.count('replica 1: failed, "rank 0"') == 2


def test_unwritable_events_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    view = RecordedView(PlainLines(), tmp_path / "file" / "events.jsonl")
    view.report_event("replica 0: started")
    view.report_event("replica 0: finished")
    shown = capsys.readouterr().out
    assert shown.count("events.jsonl cannot be written") == 1
    assert "replica 0: started" in shown and "replica 0: finished" in shown
