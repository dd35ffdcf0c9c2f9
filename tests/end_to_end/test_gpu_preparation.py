"""What runs on a GPU machine is prepared elsewhere: the wheels that travel are complete, and the
commands run with them, on a CPU."""

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.harness.ranks import REPOSITORY, run_program

SCRIPT = REPOSITORY / "scripts" / "gpu_suite.sh"
ASSUMED = {
    *("torch", "numpy", "pyarrow", "pandas", "requests", "urllib3", "pyyaml", "tqdm", "filelock"),
    *("packaging", "huggingface-hub", "tensorboard", "einops", "pillow", "markupsafe", "certifi"),
}
"""Packages that the GPU machine has: docs/gpu.md."""
MOST_MIB = 40
PYTHON = os.environ.get("GPU_SUITE_PYTHON")
"""A Python 3.12 with a CUDA build of torch and the packages of ASSUMED, to rehearse with."""


def _pins(name: str) -> dict[str, str]:
    """Return versions by name."""
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.partition(" #")[0]) for line in lines if line[:1].isalpha()]
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}


def _run(*words: object, **variables: str) -> str:
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_versions_are_those_that_the_other_tests_run_on() -> None:
    carried, tested = _pins("requirements-gpu.txt"), _pins("requirements.txt")
    tested |= {name: pin for name, pin in _pins("requirements-dev.txt").items() if pin}
    differing = {n: (pin, tested[n]) for n, pin in carried.items() if tested.get(n, pin) != pin}
    assert differing == {}
    needed = set(tested) & {canonicalize_name(name) for name in _pins("requirements.txt")}
    optional = {"plotly", "protobuf"}
    assert needed - set(carried) - ASSUMED - optional == set()


def test_without_a_gpu_the_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = run_program("-m", "benchmarks.gpu", "--quick")
    assert text == "benchmarks.gpu needs a GPU, and there is none: nothing was measured.\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheels for Python 3.12; skips without an index."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "tomli_w"]
    probe = subprocess.run([*command, "--dest", str(folder / "probe")], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("needs a package index")
    _run("prepare", folder / "all", "3.12", PYTHON=sys.executable)
    return folder / "all"


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_wheels_are_complete_and_small(wheels: Path) -> None:
    files = sorted(wheels.glob("*.whl"))
    assert sum(file.stat().st_size for file in files) < MOST_MIB * 2**20
    carried: dict[str, str] = {}
    required: list[tuple[str, Requirement]] = []
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(wheel.read(name).decode())
        carried[canonicalize_name(metadata["Name"])] = metadata["Version"]
        for text in metadata.get_all("Requires-Dist") or []:
            required.append((file.name, Requirement(text)))
    assert carried.keys() == _pins("requirements-gpu.txt").keys()
    there = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    missing = []
    for file_name, one in required:
        if one.marker is not None and not one.marker.evaluate(there):
            continue
        name = canonicalize_name(one.name)
        if name in ASSUMED:
            continue
        if name not in carried or not one.specifier.contains(carried[name], prereleases=True):
            missing.append(f"{file_name} needs {one}, carried: {carried.get(name)}")
    assert missing == []


@pytest.mark.matrix
@pytest.mark.timeout(1600)
@pytest.mark.skipif(PYTHON is None, reason="GPU_SUITE_PYTHON names no Python 3.12 with torch")
def test_the_commands_run_with_the_wheels_on_a_cpu(wheels: Path, tmp_path: Path) -> None:
    assert PYTHON is not None
    variables = {
        "PYTHON": PYTHON,
        "WORKERS": "2",
        "SITE": str(tmp_path / "site"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    results = tmp_path / "results"
    # Without a GPU: everything is collected and imported, and skipped.
    assert " skipped" in _run("test", wheels, results, **variables)
    outcomes = [json.loads(line) for line in (results / "tests.jsonl").read_text().splitlines()]
    assert {one["outcome"] for one in outcomes} == {"skipped"}
    names = {one["test"] for one in outcomes}
    assert len(outcomes) == len(names)
    for name in ("test_resume", "test_steps_of_1B", "test_snapshots_of_9_GB"):
        assert any(name in one for one in names), name
    only = "ring or chunked or generation or profiler"
    _run("test", wheels, results, "--gpu-device", "cpu", "-k", only, **variables)
    _run("bench", wheels, results, "a", "--rehearse", **variables)
    rows = json.loads((results / "gpu.json").read_text())
    (rate,) = (row for row in rows if row["metric"] == "tokens per second")
    assert rate["peer"] > 0 and rate["ours"] > 0
    _run("bench", wheels, results, "saves", "--rehearse", **variables)
    cases = {row["case"] for row in json.loads((results / "gpu.json").read_text())}
    assert cases == {"1 x 8192", "saves", "best case"}
