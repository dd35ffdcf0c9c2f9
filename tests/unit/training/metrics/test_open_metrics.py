import json
import subprocess
import sys

import pytest

from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.registry import REGISTRY, register_metrics_sink
from torchtitan_lite.training.metrics import Event, open_metrics


@pytest.fixture
def run(tmp_path, make_record):
    def run(*, rank=0, first=1, last=12, total_steps=12, **settings):
        metrics = open_metrics(
            MetricsConfig(log_freq=5, **settings),
            folder=tmp_path,
            rank=rank,
            is_leader=rank == 0,
            total_steps=total_steps,
            resume_step=first - 1,
            run_config={"training": {"steps": total_steps}},
        )
        with metrics:
            for step in range(first, last + 1):
                metrics.step(make_record(step))
            metrics.event(Event(name="validation", step=last, values={"loss": 4.5}))
        metrics.close()

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_leader_writes_json_every_step_and_shows_some(run, tmp_path, capsys):
    run()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    *steps, event = lines(tmp_path / "metrics.jsonl")
    assert [values["step"] for values in steps] == list(range(1, 13))
    del event["time"]
    assert event == {"event": "validation", "step": 12, "loss": 4.5}
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/12", "5/12", "10/12", "12/12", "step"]


def test_other_ranks_write_nothing(run, tmp_path, capsys):
    run(rank=1, enable_tensorboard=True)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_every_rank_writes_its_own_files_when_asked(run, tmp_path, capsys):
    run(rank=0, enable_tensorboard=True, save_for_all_ranks=True, save_tb_folder="board")
    capsys.readouterr()
    run(rank=2, enable_tensorboard=True, save_for_all_ranks=True, save_tb_folder="board")
    assert capsys.readouterr().out == ""
    assert len(lines(tmp_path / "metrics_rank_2.jsonl")) == 13
    assert len(lines(tmp_path / "metrics.jsonl")) == 13
    assert len(list((tmp_path / "board" / "rank_2").iterdir())) == 1
    assert len(list((tmp_path / "board").glob("events*"))) == 1


def test_tensorboard_takes_the_steps_that_are_due(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(enable_tensorboard=True)
    files = EventAccumulator(str(tmp_path / "tb"))
    files.Reload()
    assert [scalar.step for scalar in files.Scalars("loss/train")] == [1, 5, 10, 12]


def test_resume_continues_the_same_history(run, tmp_path):
    run(last=9)
    run(first=7, last=12)
    history = [values["step"] for values in lines(tmp_path / "metrics.jsonl")]
    assert history == [*range(1, 7), *range(7, 13), 12]


class FailingSink:
    """A registered sink that fails in step 2."""

    def __init__(self, context, error):
        self.context, self.error, self.steps = context, error, []

    def step(self, record):
        if record.step == 2:
            raise self.error
        self.steps.append(record.step)

    def event(self, event):
        pass

    def close(self):
        pass


@pytest.fixture
def open_failing(tmp_path):
    """Return a function that opens the metrics with a sink that fails with `error`."""

    def open_failing(error, **options):
        sinks = []
        register_metrics_sink(lambda context: sinks.append(FailingSink(context, error)) or sinks[0])
        metrics = open_metrics(
            MetricsConfig(),
            folder=tmp_path,
            rank=0,
            is_leader=True,
            total_steps=3,
            run_config={},
            **{"resume_step": 0, **options},
        )
        return metrics, sinks[0]

    yield open_failing
    REGISTRY.sinks.clear()


def test_a_sink_that_raises_oserror_loses_that_record_alone(open_failing, make_record):
    faults = OutputFaults()
    metrics, sink = open_failing(OSError("full"), faults=faults)
    with metrics:
        for step in (1, 2, 3):
            metrics.step(make_record(step))
    assert sink.steps == [1, 3]
    assert faults.summary() == ["FailingSink: 1 records not written (full)"]


def test_any_other_error_of_a_sink_ends_the_run(open_failing, make_record):
    metrics, _ = open_failing(KeyError("loss"))
    with metrics, pytest.raises(KeyError):
        for step in (1, 2, 3):
            metrics.step(make_record(step))


@pytest.mark.parametrize(
    ("options", "continues"),
    [
        ({}, False),
        ({"resume_step": 3}, True),
        # Started again before there was a state.
        ({"continues": True}, True),
        # The complete state of another run.
        ({"resume_step": 3, "continues": False}, False),
    ],
)
def test_a_sink_knows_whether_its_files_are_of_the_same_run(open_failing, options, continues):
    metrics, sink = open_failing(OSError(), **options)
    metrics.close()
    assert sink.context.continues is continues
    assert sink.context.resume_step == options.get("resume_step", 0)


def test_what_few_runs_need_is_imported_on_first_use():
    code = (
        "import sys, torchtitan_lite.training.builders\n"
        "heavy = ('tensorboard', 'torch.utils.tensorboard', 'rich', 'wandb', 'prometheus_client', "
        "'plotly', 'torchtitan_lite.tools', 'torchtitan_lite.serving.publish')\n"
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(heavy)) or 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
