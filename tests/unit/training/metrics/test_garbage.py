import gc
import logging
import weakref

import pytest
import torch

from torchtitan_lite.training.metrics import ScheduledGarbageCollection


class Cycle:
    def __init__(self) -> None:
        self.myself = self
        self.tensor = torch.zeros(2**18)


@pytest.fixture(autouse=True)
def automatic_collection():
    gc.enable()
    yield
    gc.enable()


def test_collects_only_in_its_steps_and_reports_the_time():
    with ScheduledGarbageCollection(freq=4) as collection:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        assert [collection.step(step) for step in (1, 2, 3)] == [0.0, 0.0, 0.0]
        assert cycle() is not None
        assert collection.step(4) > 0.0
        assert cycle() is None


def test_automatic_collection_is_restored_afterwards():
    collection = ScheduledGarbageCollection(freq=2)
    collection.close()
    collection.close()
    assert gc.isenabled()


def test_automatic_collection_stays_disabled_if_it_was():
    gc.disable()
    ScheduledGarbageCollection(freq=2).close()
    assert not gc.isenabled()


def test_debug_collects_every_step_and_logs_the_result(caplog):
    with ScheduledGarbageCollection(freq=50, debug=True) as collection:
        collection.step(1)
        cycle = weakref.ref(Cycle())
        with caplog.at_level(logging.INFO, logger="torchtitan_lite"):
            assert collection.step(2) > 0.0
        assert cycle() is None
    assert "step 2" in caplog.text and "1.0 MiB in tensors" in caplog.text
    assert "Cycle" in caplog.text
    assert gc.garbage == [] and gc.get_debug() == 0
