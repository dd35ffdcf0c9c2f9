"""torchft's own tests, with our lighthouse instead of torchft's."""

from pathlib import Path

import pytest

from tests.peers.environments import REPOSITORY, run_script

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
REQUIREMENTS = (
    "--requirement",
    str(REPOSITORY / "requirements.txt"),
    "torchft==0.2.0",
    "parameterized",
    "expecttest",
    "pytest",
)


def test_lighthouse_manager_and_local_sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    actual = run_script("torchft", REQUIREMENTS, "torchft_suites.py", tmp_path)
    assert actual["failed"] == []
    # Tests that need GPUs or torchcomms are skipped.
    assert len(actual["passed"]) >= 15 and actual["lighthouses"] >= 15
