"""Goodput of training under failures, by simulation (docs/failures.md).

A discrete-event model of a cluster whose ranks and machines fail, for five strategies: restart from
storage, replicas on torchft, this project's replicas, and this project without replicas with spares
and with buddy machines. Durations come from benchmarks of this repository, everything else from a
stated assumption. `CASES` are published results to compare with. Torch-free.
"""

from torchtitan_lite.tools.failure_model.events import ClusterEvents
from torchtitan_lite.tools.failure_model.job_times import JobTimes, job_times
from torchtitan_lite.tools.failure_model.picture import goodput_picture
from torchtitan_lite.tools.failure_model.published import PublishedComparison, compare
from torchtitan_lite.tools.failure_model.published_cases import CASES, PublishedCase
from torchtitan_lite.tools.failure_model.scenario import Scenario, described, overridden
from torchtitan_lite.tools.failure_model.simulation import (
    Prediction,
    predict,
    predict_given,
    predict_trace,
)
from torchtitan_lite.tools.failure_model.strategies import STRATEGIES, Strategy
from torchtitan_lite.tools.failure_model.text import (
    as_values,
    input_lines,
    parts,
    published_lines,
    table,
)
from torchtitan_lite.tools.failure_model.time_shares import TimeShares
from torchtitan_lite.tools.failure_model.traces import Trace, read_trace, slots

__all__ = [
    "CASES",
    "STRATEGIES",
    "ClusterEvents",
    "JobTimes",
    "Prediction",
    "PublishedCase",
    "PublishedComparison",
    "Scenario",
    "Strategy",
    "TimeShares",
    "Trace",
    "as_values",
    "compare",
    "described",
    "goodput_picture",
    "input_lines",
    "job_times",
    "overridden",
    "parts",
    "predict",
    "predict_given",
    "predict_trace",
    "published_lines",
    "read_trace",
    "slots",
    "table",
]
