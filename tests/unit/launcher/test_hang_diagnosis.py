"""The report about ranks that are to be ended because one of them hangs."""

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from torchtitan_lite.launcher import hang_diagnosis
from torchtitan_lite.launcher.hang_detection import RankStatus
from torchtitan_lite.launcher.supervised import rank_log


def test_a_rank_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a Python process, and py-spy is not installed."""
    monkeypatch.setattr(hang_diagnosis, "_ANSWER_S", 0.1)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    rank_log(tmp_path, 0).touch()
    with subprocess.Popen(["sleep", "100"]) as rank:
        ranks = [RankStatus(0, rank.pid, None, "S")]
        request = json.loads(hang_diagnosis.diagnosis_request(ranks, {0}, os.getpid()))
        examine = threading.Thread(
            target=hang_diagnosis.main, args=(tmp_path, request), daemon=True
        )
        examine.start()
        examine.join(10)
        rank.kill()
    assert not examine.is_alive()
    report = (tmp_path / hang_diagnosis.REPORT).read_text()
    assert f"rank 0, process {rank.pid}" in report
    assert "the rank did not write its flight record" in report
    assert "No stacks: no answer" in report
