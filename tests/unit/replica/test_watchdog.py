"""A process that hangs ends, and says where it hung."""

import subprocess
import sys
import time

import pytest

_BEGINNING = """
import ctypes, time
from torchtitan_lite.phases import Phase
from torchtitan_lite.replica.watchdog import StackWatchdog, limits_s
dog = StackWatchdog(limits_s(1.5), is_watched=False)

def enter(phase):
    dog.entered(phase, 0)

def hung_here():
    time.sleep(60)
"""
_HANGS = {
    "in Python": "enter(Phase.COMPUTE)\nhung_here()",
    "in compiled code that keeps the interpreter": (
        "def hung_here():\n    ctypes.PyDLL(None).sleep(60)\nenter(Phase.COMPUTE)\nhung_here()"
    ),
    "waiting for others": "enter(Phase.COMMUNICATION)\nhung_here()",
}


def _run(program: str) -> tuple[int, str, float]:
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", _BEGINNING + program], capture_output=True, text=True, timeout=50
    )
    return ended.returncode, ended.stderr, time.monotonic() - started


@pytest.mark.parametrize("hang", _HANGS)
def test_a_process_that_hangs_ends_with_its_stack(hang: str) -> None:
    status, said, _ = _run(_HANGS[hang])
    assert status == 1
    assert "Timeout" in said and "hung_here" in said


def test_progress_puts_it_off() -> None:
    # Longer than the limit in all, and each time by far shorter: a slow machine is no hang.
    program = (
        "for _ in range(8):\n    enter(Phase.COMPUTE)\n    time.sleep(0.2)\n"
        "enter(Phase.BETWEEN)\ntime.sleep(1.7)"
    )
    status, said, _ = _run(program)
    assert (status, said) == (0, "")
