"""What the fake-CUDA suite replaces exists: few machines have the environment that runs it."""

import re
from pathlib import Path
from pkgutil import resolve_name

_JOB = Path(__file__).parents[1] / "fake_cuda" / "job.py"


def test_replaced_names_exist() -> None:
    names = re.findall(r'"(torchtitan_lite(?:\.\w+)+)"', _JOB.read_text())
    assert len(names) == _JOB.read_text().count("patch(")
    for name in names:
        resolve_name(name)
