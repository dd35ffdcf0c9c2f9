"""`DTensor.redistribute` with either of its planners, which torch offers no public way to choose.

Each planner keeps a cache of its own here: torch's holds whichever plan was made first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.distributed.tensor import _redistribute

PLANNERS = ("default", "min-cost")

_caches: dict[str, Any] = {
    name: cache(_redistribute._gen_transform_infos_non_cached) for name in PLANNERS
}


@contextmanager
def planner(name: str) -> Iterator[None]:
    """Let DTensor plan by one of PLANNERS."""
    module: Any = _redistribute
    before = module._gen_transform_infos
    module._gen_transform_infos = _caches[name]
    try:
        if name == "default":
            yield
        else:
            with _redistribute.use_min_cost_redistribution_plan():
                yield
    finally:
        module._gen_transform_infos = before
