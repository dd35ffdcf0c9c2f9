"""A plugin of pytest that runs in the process of a mutant: limits the time of each test, and
records what fails first.

A time-out kills a mutant only if the test takes less than a third of the limit without it.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

_BROKEN = (ImportError, SyntaxError, NameError, TypeError, AttributeError)
_BROKEN_NAME = re.compile(
    r"^(?:ImportError|ModuleNotFoundError|SyntaxError|NameError|UnboundLocalError|TypeError"
    r"|AttributeError)\b",
    re.MULTILINE,
)
_MAX_REASON = 300


class Killer:
    """Writes each test's deadline, for the process that watches this one, and the outcome."""

    def __init__(self, outcome: Path, durations_s: dict[str, float]) -> None:
        self._outcome = outcome
        self._durations_s = durations_s

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.timeout(self._limit_s(item.nodeid)), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, deadline=time.monotonic() + 1.5 * self._limit_s(nodeid) + 10)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = (yield).get_result()
        if not report.failed or call.excinfo is None:
            return
        reason = f"{call.excinfo.typename}: {call.excinfo.value}"
        # The error of a rank is part of the message.
        is_broken = issubclass(call.excinfo.type, _BROKEN) or (
            call.excinfo.typename == "RankFailed" and _BROKEN_NAME.search(reason)
        )
        outcome = "broken" if is_broken else "killed"
        if "Timeout (>" in reason:
            outcome = "timeout"
        self._write(test=item.nodeid, outcome=outcome, reason=reason[-_MAX_REASON:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            reason = str(report.longrepr)[-_MAX_REASON:]
            self._write(test=report.nodeid, outcome="broken", reason=reason)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self._write(outcome="survived")

    def _limit_s(self, test: str) -> float:
        return max(20.0, 3 * self._durations_s.get(test, 0.0) + 10)

    def _write(self, **values: Any) -> None:
        draft = self._outcome.with_suffix(".new")
        draft.write_text(json.dumps(values))
        draft.rename(self._outcome)


def pytest_configure(config: pytest.Config) -> None:
    outcome = Path(os.environ["MUTANT_OUTCOME"])
    durations_s = json.loads(outcome.with_suffix(".durations").read_text())
    config.pluginmanager.register(Killer(outcome, durations_s))
