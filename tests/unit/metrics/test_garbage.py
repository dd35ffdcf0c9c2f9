import gc
import logging
import weakref

import pytest
import torch

from torchtitan_lite.metrics import ScheduledGarbageCollection


class Cycle:
    def __init__(self) -> None:
        self.myself = self
        self.tensor = torch.zeros(2**18)


@pytest.fixture(autouse=True)
def automatic_collection():
    gc.enable()
    yield
    gc.enable()


def test_collects_in_its_steps_only_and_tells_the_time():
    with ScheduledGarbageCollection(freq=4) as collection:
        assert not gc.isenabled()
        found = weakref.ref(Cycle())
        assert [collection.step(step) for step in (1, 2, 3)] == [0.0, 0.0, 0.0]
        assert found() is not None
        assert collection.step(4) > 0.0
        assert found() is None


def test_automatic_collection_is_on_again_afterwards():
    collection = ScheduledGarbageCollection(freq=2)
    collection.close()
    collection.close()
    assert gc.isenabled()


def test_automatic_collection_stays_off_for_who_had_it_off():
    gc.disable()
    ScheduledGarbageCollection(freq=2).close()
    assert not gc.isenabled()


def test_debug_collects_every_step_and_logs_what_it_found(caplog):
    with ScheduledGarbageCollection(freq=50, debug=True) as collection:
        collection.step(1)
        found = weakref.ref(Cycle())
        with caplog.at_level(logging.INFO, logger="torchtitan_lite"):
            assert collection.step(2) > 0.0
        assert found() is None
    assert "step 2" in caplog.text and "1.0 MiB in tensors" in caplog.text
    assert "Cycle" in caplog.text
    assert gc.garbage == [] and gc.get_debug() == 0
