"""FOLDER OUT: torchft's own tests of its lighthouse, manager and LocalSGD, with our lighthouse in
the place of torchft's."""

import json
import sys
from typing import Any

import pytest
import torchft._torchft as native

from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService

SUITES = ("torchft.lighthouse_test", "torchft.manager_integ_test", "torchft.local_sgd_integ_test")


class Lighthouse:
    """`torchft._torchft.LighthouseServer`, by ours."""

    count = 0

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        # torchft's defaults; it has no tick of ours, because ours acts on each call.
        settings = QuorumSettings(
            min_replicas, join_timeout_ms or 100, heartbeat_timeout_ms or 5000
        )
        self._service = LighthouseService("127.0.0.1:0", settings).start()
        Lighthouse.count += 1

    def address(self) -> str:
        return f"http://{self._service.address}"

    def shutdown(self) -> None:
        self._service.stop()


class Outcomes:
    """Collects the outcome of each test."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.outcome].append(report.nodeid.rpartition("/")[2])


native.LighthouseServer = Lighthouse
outcomes = Outcomes()
pytest.main(["-q", "-p", "no:cacheprovider", "--pyargs", *SUITES], plugins=[outcomes])
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump({**outcomes.found, "lighthouses": Lighthouse.count}, file)
