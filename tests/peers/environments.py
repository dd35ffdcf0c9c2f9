"""A separate environment for each peer, because their requirements differ from ours. Environments
are created once, in `.venv-peers`, and reused."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
_ENVIRONMENTS = REPOSITORY / ".venv-peers"
_SCRIPTS = Path(__file__).parent / "scripts"
TORCH = "torch==2.13.0"


def run_script(
    environment: str,
    requirements: tuple[str, ...],
    script: str,
    *words: object,
    without: tuple[str, ...] = (),
) -> Any:
    """Return the JSON that a script of `scripts` writes to the path given as its last argument,
    when run in an environment with these requirements, and `without` some that they require.
    Skips the test if they cannot be installed."""
    python = _python(environment, (TORCH, *requirements), without)
    out = Path(str(words[0])) / f"{Path(script).stem}.json"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        variables.pop(name, None)
    done = subprocess.run(
        [python, str(_SCRIPTS / script), *map(str, words), str(out)],
        env=variables,
        cwd=str(words[0]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def _python(name: str, requirements: tuple[str, ...], without: tuple[str, ...]) -> str:
    folder = _ENVIRONMENTS / name
    python, marker = folder / "bin" / "python", folder / ".installed"
    expected = "\n".join((*requirements, *(f"without {one}" for one in without)))
    _ENVIRONMENTS.mkdir(exist_ok=True)
    with (_ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists() and marker.read_text() == expected:
            return str(python)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *requirements],
            *([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", one] for one in without),
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                continue
            pytest.skip(f"{', '.join(requirements)} cannot be installed: {done.stderr[-300:]}")
        marker.write_text(expected)
    return str(python)
