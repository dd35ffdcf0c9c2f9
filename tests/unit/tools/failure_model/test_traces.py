"""Traces of machines, and their replay as a slots file."""

from pathlib import Path

import pytest

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.tools.failure_model import (
    STRATEGIES,
    Scenario,
    predict_trace,
    read_trace,
    slots,
)
from torchtitan_lite.tools.failure_model.events import ClusterEvents

TRACE = """\
60000,add,node1
60000,add,node2
60000,add,node3
120000,remove,node1
120000,remove,node3
180000,add,node4
180000,add,node5
180000,remove,node5
3600000,add,node1
7200000,remove,node2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_the_begin_is_a_state_and_equal_times_are_one_event(path: Path) -> None:
    trace = read_trace(path)
    assert trace.initial == {0, 1, 2}
    assert list(trace.changes) == [
        ClusterEvents(at_s=60, lost=frozenset({0, 2})),
        ClusterEvents(at_s=120, arrived=frozenset({3})),
        ClusterEvents(at_s=3540, arrived=frozenset({0})),
        ClusterEvents(at_s=7140, lost=frozenset({1})),
    ]
    assert (trace.num_losses, trace.most_machines, trace.duration_s) == (3, 3, 7140)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("0,add\n", "line 1 is '0,add', must be MILLISECONDS,add,NODE"),
        ("0,add,a\n-5,remove,a\n", "line 2 is '-5,remove,a'"),
        ("0,add,a\n5,drop,a\n", "line 2"),
        ("9,add,a\n5,add,b\n", "line 2: 5 ms is before the line above"),
        ("0,add,a\n5,add,a\n", "line 2: add of a, which is present"),
        ("0,remove,a\n", "line 1: remove of a, which is absent"),
        ("0,add,\udcff\n0,add,\n", "line 2 is '0,add,'"),
    ],
)
def test_a_malformed_trace_is_rejected_with_its_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as raised:
        read_trace(path)
    assert problem in str(raised.value) and str(path) in str(raised.value)


def test_a_trace_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(DataError, match="limit of a trace"):
        read_trace(path)


def test_slots_keep_machines_with_their_replicas(path: Path) -> None:
    assert list(slots(read_trace(path), 2, 2)) == [
        (0.0, {"0": 2, "1": 1}),
        (60.0, {"0": 0, "1": 1}),
        (120.0, {"0": 1, "1": 1}),
        (3540.0, {"0": 2, "1": 1}),
        (7140.0, {"0": 2, "1": 0}),
    ]
    assert next(iter(slots(read_trace(path), 1, 2))) == (0.0, {"0": 2})


def test_a_trace_is_simulated_for_the_machines_that_are_there(path: Path) -> None:
    trace = read_trace(path)
    # Recoveries end before machines arrive.
    scenario = Scenario(lost_machine_s=0.0)
    found = {one.strategy.name: one for one in predict_trace(scenario, STRATEGIES, trace)}
    for one in found.values():
        # 3 machines for 60 s, 1 for 60 s, 2 for 3,420 s, 3 for 3,600 s.
        assert one.shares.capacity == pytest.approx(180 + 60 + 6840 + 10_800)
        assert 0 < one.shares.goodput < 1
    # The whole job waits before it takes machines that have arrived; replicas do not.
    assert found["replicas"].shares.waiting == 0
    regrow_s = scenario.regrow_after_s
    assert found["restart"].shares.waiting == pytest.approx(regrow_s + regrow_s)


def test_a_job_grows_only_from_a_state_that_it_has_loaded(tmp_path: Path) -> None:
    """A machine that arrives during a recovery is taken after it, and the state that is saved then
    is the one that was trained since."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "0,add,a\n0,add,b\n0,add,c\n5000000,remove,a\n5001000,add,d\n9000000,add,e\n"
        "9000000,remove,e\n20000000,remove,b\n"
    )
    scenario = Scenario(regrow_after_s=0.0, save_interval_steps=100)
    (found,) = predict_trace(scenario, STRATEGIES[:1], read_trace(path))
    # Lost: what was trained since the last save before 5,000 s, and nothing when it grew.
    assert 0 < found.shares.lost <= 3 * 700
    assert found.shares.waiting < 60
