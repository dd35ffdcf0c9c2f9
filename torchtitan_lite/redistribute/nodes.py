"""On which node a holder lies. Layer: above holder_mesh."""

from collections.abc import Hashable
from dataclasses import dataclass

from torchtitan_lite.redistribute.holder_mesh import Holder


@dataclass(frozen=True)
class Nodes:
    """Where holders lie: ranks in equal numbers on each node, one node after the other."""

    ranks_per_node: int
    relay: bool = False
    """Let what several holders of a node need come to the node once."""

    def of(self, holder: Holder) -> Hashable:
        """The node of a holder; one that is no rank is a node of its own."""
        return holder // self.ranks_per_node if isinstance(holder, int) else holder
