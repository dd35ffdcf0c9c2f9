"""A plugin of pytest that records the duration of each test and the sites that it reaches.

What a module's fixtures reach counts for all tests of the module.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.imports import hit_map


class Recorder:
    def __init__(self, folder: Path, num_sites: int) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        hits = folder / f"hits-{worker}"
        hits.write_bytes(bytes(num_sites))
        os.environ["MUTANT_HITS"] = str(hits)
        self._hits = hit_map(str(hits))
        self._num_sites = num_sites
        self._file = (folder / f"tests-{worker}.jsonl").open("a")
        self._module = ""
        self._setup: set[int] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.location[0] != self._module:
            self._module, self._setup = item.location[0], set()
        self._taken()
        self._failed = self._skipped = False
        started = time.monotonic()
        yield
        duration_s = time.monotonic() - started
        reached = self._taken() | self._setup
        if not self._failed and not self._skipped:
            record = {
                "test": item.nodeid,
                "duration_s": round(duration_s, 3),
                "is_matrix": item.get_closest_marker("matrix") is not None,
                "sites": sorted(reached),
            }
            print(json.dumps(record), file=self._file, flush=True)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        yield
        self._setup |= self._taken()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._skipped |= report.skipped

    def _taken(self) -> set[int]:
        content = bytes(self._hits)
        if not any(content):
            return set()
        self._hits[:] = bytes(self._num_sites)
        return {index for index, byte in enumerate(content) if byte}


def pytest_configure(config: pytest.Config) -> None:
    distributes = bool(config.getoption("numprocesses", None))
    if not distributes or hasattr(config, "workerinput"):
        folder = Path(os.environ["MUTANT_BASES"]).parent
        config.pluginmanager.register(Recorder(folder, int(os.environ["MUTANT_SITES"])))
