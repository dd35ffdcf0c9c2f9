"""Layouts of distributed tensors, and one planner that moves state between any two of them.

A `Layout` maps holders (ranks, files, snapshots) to the boxes of a tensor that they hold, `plan`
computes the exchange from one layout to another, and `redistribute_state_dict` executes it. Reading
order: placements, partition, layout; intersections, transfers, exchange, cost, plan; program, the
two transports, execute; then dtensor and read_plan, the entry points.
"""

from torchtitan_lite.distributed.redistribute.cost import ExchangeOptions
from torchtitan_lite.distributed.redistribute.dtensor import align_gradient, redistribute_state_dict
from torchtitan_lite.distributed.redistribute.intersections import choose_owners
from torchtitan_lite.distributed.redistribute.layout import Box, Layout, TensorSpec, local_box
from torchtitan_lite.distributed.redistribute.placements import HolderMesh
from torchtitan_lite.distributed.redistribute.plan import Plan, plan
from torchtitan_lite.distributed.redistribute.serialization import (
    gather_specs,
    layout_from_json,
    layout_to_json,
    match_layouts,
)

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
