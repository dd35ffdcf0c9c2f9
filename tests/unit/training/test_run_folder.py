"""Leases that a run holds: of its folder, and of its snapshots on this machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.training import run_folder
from torchtitan_lite.training.run_folder import hold_folder


def test_both_leases_are_held_in_the_block(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Lease:
        def __init__(self, places: Any, instance: str, *, on_loss: object) -> None:
            assert instance
            self.places = () if places.held is None else ("a folder",)
            self._name = "folder" if self.places else "snapshots"

        def acquire(self, *, waits: bool, tick: object = None) -> None:
            log.append(f"{self._name}, waits: {waits}")

        def release(self) -> None:
            log.append(f"{self._name} released")

    monkeypatch.setattr(run_folder, "RunLease", Lease)
    monkeypatch.setattr(run_folder, "places_of", lambda config: SimpleNamespace(held="folder"))
    monkeypatch.setattr(run_folder, "LeasePlaces", lambda **given: SimpleNamespace(held=None))
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    config: Any = SimpleNamespace(
        job=SimpleNamespace(when_in_use="wait", dump_folder=str(tmp_path)),
        fault_tolerance=SimpleNamespace(replica=0),
    )
    with hold_folder(config, mesh, stays=False) as places:
        assert places == ("a folder",)
        assert log == ["folder, waits: True", "snapshots, waits: False"]
    assert log[2:] == ["folder released", "snapshots released"]
