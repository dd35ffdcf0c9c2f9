"""The logger: its level per rank, one handler, the rank in each line."""

import logging
import re
import sys
import warnings

import pytest

from torchtitan_lite.core.log import configure_logging, is_live_terminal, logger, warn_on_rank_0


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHTITAN_LITE_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("rank", "given", "variable", "level"),
    [
        ("0", None, None, logging.INFO),
        ("3", None, None, logging.WARNING),
        ("3", "DEBUG", None, logging.DEBUG),
        ("0", "DEBUG", "ERROR", logging.ERROR),
    ],
)
def test_the_level_follows_rank_argument_and_environment(
    rank: str,
    given: str | None,
    variable: str | None,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    if variable is not None:
        monkeypatch.setenv("TORCHTITAN_LITE_LOG", variable)
    configure_logging(given)
    assert logger.level == level


def test_each_line_is_logged_once_with_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    configure_logging()
    configure_logging()
    logger.info("too quiet")
    logger.warning("seen")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING \[rank 2\] seen\n", err)
    assert "quiet" not in err


def test_a_run_logs_to_the_stream_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(beside_steps=True)
    logger.info("saved")
    print("step 1")
    logger.warning("odd")
    logger.error("fatal")
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\S+ INFO saved\nstep 1\n\S+ WARNING odd\n", out)
    assert re.fullmatch(r"\S+ ERROR fatal\n", err)


def test_a_warning_of_all_ranks_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        configure_logging()
        warn_on_rank_0("%s differs", "it")
    assert capsys.readouterr().err.count("it differs") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_python_warnings_of_a_rank_are_shown_once(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        configure_logging()
        for _ in range(2):
            warnings.warn("deprecated", FutureWarning, stacklevel=1)
            warnings.warn("this stage", UserWarning, stacklevel=1)
            warnings.warn("this device", RuntimeWarning, stacklevel=1)
    deprecated = ["deprecated"] if rank == "0" else []
    assert [str(one.message) for one in shown] == [*deprecated, "this stage", "this device"]


def test_one_process_shows_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logger.info("alone")
    assert "rank" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_terminal", "kind", "is_live"),
    [(True, "xterm", True), (True, None, True), (True, "dumb", False), (False, "xterm", False)],
)
def test_a_live_terminal_can_move_its_cursor(
    is_terminal: bool, kind: str | None, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.delenv("TERM", raising=False)
    if kind is not None:
        monkeypatch.setenv("TERM", kind)
    assert is_live_terminal() is is_live


def test_records_are_printed_once() -> None:
    """Handlers of the root logger, such as those of a library, would print them again."""
    logger.propagate = True
    configure_logging()
    assert not logger.propagate
