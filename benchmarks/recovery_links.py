"""The cost of a cut link: a replica is cut off the network for some time.

Two replicas and a lighthouse, each in a network namespace of its own. The replica's link to all
others is cut without notice to any process. Afterwards losses, samples and the final state must
equal those of a run without faults. Needs root.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Comparison, Result
from benchmarks.processes import ChildFailed
from tests.resilience.network.hosts import network_replicas, replica
from tests.resilience.network.namespaces import unavailable_reason

_MAX_DELAY_S = 3.0
"""Time after the end of the cut until all train together again."""


def measure_cut(cut_s: float, folder: Path) -> Iterator[Result]:
    """Measure one cut of `cut_s`; nothing, with a message, where there are no namespaces."""
    if reason := unavailable_reason():
        print(f"The link cut is not measured: {reason}.", flush=True)
        return
    try:
        with network_replicas(folder / "run", 2) as run:
            run.train_until_all_participate()
            begin_s = time.time()
            run.network.unplug(replica(1))
            time.sleep(cut_s)
            end_s = time.time()
            run.network.plug(replica(1))
            together_s = run.wait_until_together(end_s)
            pause_s = run.longest_pause_s(0, begin_s, end_s)
            run.check_against_undisturbed_run(folder)
    except AssertionError as error:
        raise ChildFailed(f"The run with a cut link: {error}") from None
    comparison = Comparison(f"link of 1 of 2 replicas cut for {cut_s:g} s", other="without faults")
    comparison.note("losses, samples and final state equal those without faults")
    yield comparison.value("longest pause of the other replica", "s", pause_s)
    metric = "from the end of the cut until both train together"
    yield comparison.value(metric, "s", together_s, goal=_MAX_DELAY_S)
