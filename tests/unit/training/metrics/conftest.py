"""Records for the tests of metrics."""

from collections.abc import Callable

import pytest

from torchtitan_lite.training.metrics import StepRecord

MakeRecord = Callable[..., StepRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """A function that returns a plausible step record with the given fields."""

    def make(step: int, **changes: object) -> StepRecord:
        values: dict[str, object] = {
            "step": step,
            "loss": 4.03125,
            "grad_norm": 0.71,
            "lr": 8e-4,
            "tokens": 4096 * step,
            "num_target_tokens": 4000,
            "tokens_per_second": 41230.4,
            "mfu": None,
            "memory_gib": 0.61,
            "step_time_s": 0.25,
            "data_time_s": 0.01,
            "checkpoint_stall_s": 0.0,
            "gc_time_s": 0.0,
            "num_replicas": 1,
        }
        return StepRecord(**(values | changes))  # pyright: ignore[reportArgumentType]

    return make
