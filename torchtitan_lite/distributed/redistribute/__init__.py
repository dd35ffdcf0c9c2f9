"""Layouts of distributed tensors, and one planner that moves state between any two of them.

A `Layout` maps holders (ranks, files, snapshots) to the boxes of a tensor that they hold, `plan`
computes the exchange from one layout to another, and `redistribute_state_dict` executes it. Reading
order in `planning`: placements, partition, layout; intersections, transfers, reductions, exchange,
cost, plan; in `execution`: program, the two transports, execute; then dtensor and read_plan, the
entry points.
"""

from torchtitan_lite.distributed.redistribute.execution.dtensor import (
    align_gradient,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.execution.serialization import (
    gather_specs,
    layout_from_json,
    layout_to_json,
    match_layouts,
)
from torchtitan_lite.distributed.redistribute.planning.cost import ExchangeOptions
from torchtitan_lite.distributed.redistribute.planning.intersections import choose_owners
from torchtitan_lite.distributed.redistribute.planning.layout import (
    Box,
    Layout,
    TensorSpec,
    local_box,
)
from torchtitan_lite.distributed.redistribute.planning.placements import HolderMesh
from torchtitan_lite.distributed.redistribute.planning.plan import Plan, plan

__all__ = [
    "Box",
    "ExchangeOptions",
    "HolderMesh",
    "Layout",
    "Plan",
    "TensorSpec",
    "align_gradient",
    "choose_owners",
    "gather_specs",
    "layout_from_json",
    "layout_to_json",
    "local_box",
    "match_layouts",
    "plan",
    "redistribute_state_dict",
]
