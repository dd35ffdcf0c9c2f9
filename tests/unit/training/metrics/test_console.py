import functools
import io
import logging
import math
import os
import pty
import re
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.ranks import FORK_SERVER, send_output_to
from torchtitan_lite.core.durations import clock
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.training.metrics import Event, StepRecord
from torchtitan_lite.training.metrics.console import LiveBar, StepLines, open_console
from torchtitan_lite.training.metrics.sink import Cadence


def run_on_terminal(terminal, color, no_color_variable):
    """Log and print next to a progress bar, in a process whose output goes to `terminal`."""
    send_output_to(terminal)
    os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    os.environ["NO_COLOR"] = no_color_variable
    configure_logging("INFO", beside_steps=True)
    bar = open_console(cadence(4), color=color)
    stdout, stderr = sys.stdout, sys.stderr
    for step in range(1, 5):
        bar.step(
            StepRecord(
                step=step,
                loss=4.0,
                grad_norm=1.0,
                lr=1e-3,
                tokens=1,
                num_target_tokens=1,
                tokens_per_second=5.0,
                mfu=None,
                memory_gib=0.5,
                step_time_s=1.0,
                data_time_s=0.0,
                checkpoint_stall_s=0.0,
                gc_time_s=0.0,
                num_replicas=1,
            )
        )
        logger.info(f"log line {step}")
        print(f"print line {step}")
    bar.close()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    streams = [one.stream for one in logger.handlers if isinstance(one, logging.StreamHandler)]
    assert streams == [stderr, stdout]
    logger.info("after the bar")


def cadence(last_step, first_step=1, log_freq=10):
    return Cadence(log_freq=log_freq, first_step=first_step, last_step=last_step)


def test_a_plain_line(capsys, make_record):
    lines = StepLines(cadence(288))
    lines.step(make_record(120, mfu=0.1234))
    lines.step(make_record(130))
    assert capsys.readouterr().out.splitlines() == [
        "step 120/288  loss 4.0312  grad_norm 0.71  lr 8.0e-04  tok/s 41,230  mfu 12.3 %"
        "  mem 0.61 GiB  left 0:42",
        "step 130/288  loss 4.0312  grad_norm 0.71  lr 8.0e-04  tok/s 41,230  mem 0.61 GiB"
        "  left 0:40",
    ]


def test_lines_at_the_first_step_every_log_freq_and_the_last(capsys, make_record):
    lines = StepLines(cadence(25, first_step=3))
    for step in range(3, 26):
        lines.step(make_record(step))
    shown = re.findall(r"step (\d+)/25", capsys.readouterr().out)
    assert shown == ["3", "10", "20", "25"]


def test_a_skipped_step_is_always_shown(capsys, make_record):
    StepLines(cadence(25)).step(make_record(7, loss=float("nan"), skipped=True))
    out = capsys.readouterr().out
    assert "step 7/25" in out and "loss nan" in out and "skipped" in out


def test_an_event_line(capsys):
    values = {"loss": 4.25, "zero": 0.0, "small": -2e-16, "n": 3}
    StepLines(cadence(9)).event(Event(name="validation", step=5, values=values))
    shown = "loss 4.2500  zero 0.0000  small -2.0e-16  n 3"
    assert capsys.readouterr().out == f"validation  step 5  {shown}\n"


def test_event_text_stays_on_its_line_and_is_escaped(capsys):
    values = {"1": "größer 字", "2": "a\nb", "3": "\x1b[2J\x9b"}
    StepLines(cadence(9)).event(Event(name="sample", step=5, values=values))
    expected = "sample  step 5  1 größer 字  2 'a\\nb'  3 '\\x1b[2J\\x9b'\n"
    assert capsys.readouterr().out == expected


def test_no_terminal_gets_plain_lines(capsys):
    assert isinstance(open_console(cadence(9), color=True), StepLines)


def test_the_bar_advances_with_every_step(make_record):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(force_terminal=True, file=screen, width=100, color_system=None)
    bar = LiveBar(cadence(40), color=True, console=console)
    for step in (1, 2, 3):
        bar.step(make_record(step, loss=4.0 + step))
    bar.event(Event(name="validation", step=3, values={"loss": 4.5}))
    bar.close()
    bar.close()
    drawn = screen.getvalue()
    for text in ("step 1/40", "step 2/40", "step 3/40", "loss 7.0000", "41,230 tok/s", "0.61 GiB"):
        assert text in drawn
    assert "left 0:09" in drawn
    assert drawn.count("grad_norm") == 1  # only step 1 was due
    assert "validation  step 3  loss 4.5000\n" in drawn


@pytest.mark.parametrize(
    ("color", "no_color_variable", "colored"),
    [(True, "", True), (False, "", False), (True, "1", False)],
)
def test_color_is_on_unless_disabled(color, no_color_variable, colored):
    sent = sent_to_terminal(color, no_color_variable)
    assert bool(re.search(r"\x1b\[(\d+;)*[349]\d", sent)) == colored


def test_on_a_terminal_logs_print_above_the_bar_and_streams_are_restored():
    lines = replay(sent_to_terminal(True, ""))
    for step in range(1, 5):
        assert any(re.fullmatch(rf"\d\d:\d\d:\d\d INFO log line {step}", line) for line in lines)
        assert f"print line {step}" in lines
    bars = [number for number, line in enumerate(lines) if "left" in line and "━" in line]
    assert len(bars) == 1, lines
    assert "step 4/4" in lines[bars[0]]
    assert lines[bars[0] + 1].endswith("after the bar")


@functools.cache
def sent_to_terminal(color, no_color_variable):
    """Return what a process under a pty of 100 columns sends to it."""
    parent, child = pty.openpty()
    arguments = (os.ttyname(child), color, no_color_variable)
    process = FORK_SERVER.Process(target=run_on_terminal, args=arguments)
    process.start()
    os.set_blocking(parent, False)
    received = b""
    while True:
        has_ended = process.exitcode is not None
        with suppress(BlockingIOError):
            received += os.read(parent, 65536)
            continue
        if has_ended:
            break
        process.join(0.02)
    os.close(parent)
    os.close(child)
    assert process.exitcode == 0, received.decode()
    return received.decode()


def replay(output):
    """Return the final screen, interpreting carriage returns, cursor movements and erased lines."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", token):
            row -= int(up[1] or 1)
        elif not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "?"), (0, "0:00"), (42.4, "0:42"), (3723, "1:02:03"), (183845, "2d 03:04:05")]
    + [(value, "?") for value in (math.inf, -math.inf, math.nan)],
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


def test_what_is_logged_is_not_printed_as_an_event_too(capsys):
    lines = StepLines(cadence(9))
    for name in ("refused", "rolled_back", "step_failed", "quorum", "slow_rank", "error"):
        lines.event(Event(name=name, step=5, values={}))
    assert capsys.readouterr().out == ""


def test_a_closed_bar_does_not_touch_the_streams_again():
    calls = []
    bar: Any = object.__new__(LiveBar)
    bar._redirected = [(SimpleNamespace(setStream=calls.append), "stderr")]
    bar._progress = SimpleNamespace(stop=lambda: calls.append("stopped"))
    for _ in range(2):
        bar.close()
        assert calls == ["stderr", "stopped"]
