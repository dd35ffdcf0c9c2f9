"""The scorer of diagnoses counts what the product said, and some faults of running jobs are named
right."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.__main__ import draw, main
from tests.diagnosis.faults import KINDS
from tests.diagnosis.scorer import Answer, DiagnosisReader, Verdict, judge
from tests.diagnosis.table import markdown_table, share_right
from torchtitan_lite.core.diagnosis import WRITER, Cause, Diagnosis

_ANSWER = Answer(causes=(Cause.SLOW_LINK,), replica=0, rank=2)


def _said(cause: Cause, rank: int, **values: Any) -> dict[str, Any]:
    diagnosis = Diagnosis(cause=cause, text="", rank=rank, replica=0, **values)
    return json.loads(diagnosis.to_json())


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([], Verdict.SILENT),
        ([_said(Cause.SLOW_LINK, 2)], Verdict.RIGHT),
        ([_said(Cause.SLOW_LINK, 2), _said(Cause.HANG, 2)], Verdict.RIGHT),
        ([_said(Cause.HANG, 2), _said(Cause.SLOW_LINK, 2)], Verdict.WRONG_CAUSE),
        ([_said(Cause.SLOW_LINK, 1)], Verdict.WRONG_RANK),
        ([_said(Cause.SLOW_LINK, 2), _said(Cause.HANG, 1)], Verdict.WRONG_RANK),
        ([_said(Cause.SLOW_LINK, 2, process=WRITER)], Verdict.WRONG_RANK),
        ([_said(Cause.SLOW_LINK, 1, peers=((0, 2),))], Verdict.WRONG_RANK),
    ],
)
def test_verdicts(said: list[dict[str, Any]], verdict: Verdict) -> None:
    assert judge(_ANSWER, said) is verdict


def test_either_end_of_a_link_without_a_third_rank_is_right() -> None:
    answer = Answer(causes=(Cause.DEAD_LINK,), replica=0, rank=2, either_end=True)
    assert judge(answer, [_said(Cause.DEAD_LINK, 1, peers=((0, 2),))]) is Verdict.RIGHT
    assert judge(answer, [_said(Cause.DEAD_LINK, 1, peers=((0, 3),))]) is Verdict.WRONG_RANK


def test_diagnoses_of_all_processes_are_read_once_in_their_order(tmp_path: Path) -> None:
    reader = DiagnosisReader(tmp_path)
    assert reader.read() == []
    (tmp_path / "launch_logs").mkdir()
    (tmp_path / "replica_001").mkdir()
    rank = tmp_path / "replica_001" / "diagnoses_rank_3.jsonl"
    rank.write_text('{"time": 2, "cause": "b"}\n{"time": 4, "ca')
    (tmp_path / "launch_logs" / "diagnoses.jsonl").write_text('{"time": 1, "cause": "a"}\n')
    assert [one["cause"] for one in reader.read()] == ["a", "b"]
    rank.write_text(rank.read_text() + 'use": "c"}\n')
    assert [one["cause"] for one in reader.read()] == ["c"]


def test_kinds_are_drawn_equally_often_and_counted_in_the_table() -> None:
    faults = draw(list(KINDS.values()), 2 * len(KINDS), seed=5)
    assert set(Counter(fault.kind.name for fault in faults).values()) == {2}
    assert faults == draw(list(KINDS.values()), 2 * len(KINDS), seed=5)
    results: list[dict[str, Any]] = [
        {"kind": "slow link", "verdict": verdict, "evidence": ["x | y"]}
        for verdict in ("right", "right", "right", "silent", "not injected")
    ]
    assert share_right(results) == 0.75
    assert "| slow link | 4 | 3 | 0 | 0 | 1 | `x / y` |" in markdown_table(results)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="faults of links need root")
def test_faults_of_a_running_job_are_named_right(tmp_path: Path) -> None:
    kinds = "checkpoint writer killed,clock jump,stopped rank,repeated collective,NaN in data"
    arguments = ["--faults=5", "--seed=7", f"--kinds={kinds}", f"--folder={tmp_path / 'jobs'}"]
    assert main([*arguments, f"--results={tmp_path / 'results'}"]) == 0
