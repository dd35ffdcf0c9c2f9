"""Where state lies, and the one planner that moves it between any two layouts.

A `Layout` says which holder has which boxes of a tensor, `plan` how to get from one to another, and
`redistribute` and `redistribute_state_dict` go there. Read in this order: holder_mesh, placements,
strided, cuts, layout, roles, common_parts, sharing, pieces, reduction, exchange, cost, collective,
search, plan; then words, program, shared_path, collective_path, execution, legs; traffic and
explain tell of a plan, assignment chooses ranks, and by description ranks tell each other what they
hold.

Layer: above mesh and spec.
"""

from torchtitan_lite.redistribute.assignment import choose_holders
from torchtitan_lite.redistribute.box import Box
from torchtitan_lite.redistribute.description import describe, layouts_of
from torchtitan_lite.redistribute.dtensor import redistribute
from torchtitan_lite.redistribute.explain import explain
from torchtitan_lite.redistribute.gradient import align_gradient
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.layout_json import layout_from_json, layout_to_json
from torchtitan_lite.redistribute.local import is_first_holder, local_box
from torchtitan_lite.redistribute.means import Means
from torchtitan_lite.redistribute.plan import Plan, plan
from torchtitan_lite.redistribute.state_dict import Placed, redistribute_state_dict

__all__ = [
    "Box",
    "HolderMesh",
    "Layout",
    "Means",
    "Placed",
    "Plan",
    "align_gradient",
    "choose_holders",
    "describe",
    "explain",
    "is_first_holder",
    "layout_from_json",
    "layout_to_json",
    "layouts_of",
    "local_box",
    "plan",
    "redistribute",
    "redistribute_state_dict",
]
