"""The peak of live tensor bytes, as torch's allocator counts them.

Not the process's resident memory: that only grows, holds what the C library keeps for later, and
moves with all else that the process does. Buffers that are no tensors (gloo's own) are not seen.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors made by `work` that live at once. What lived before is not
    counted; `work` runs slower than without."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        # The trace is the one public place that tells of single allocations, in order of time.
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
