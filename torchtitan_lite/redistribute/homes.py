"""Where contributions to a sum are joined. Layer: above common_parts, pieces and sharing.

Invariant: of several homes that are possible each joins an equal share; one that contributes itself
is preferred.
"""

from typing import NamedTuple

import numpy as np

from torchtitan_lite.redistribute.common_parts import Common, CommonParts
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.pieces import block_size, row_size
from torchtitan_lite.redistribute.roles import Roles
from torchtitan_lite.redistribute.sharing import stripes


class Home(NamedTuple):
    """Where the contributions to elements [start, stop) of a piece are joined."""

    holder: Holder
    contribution: int | None
    """Its own; None where it has none."""
    copy: int
    """The contribution of the destination that will carry the result."""
    start: int
    stop: int


def homes_of(parts: CommonParts, common: Common) -> list[Home]:
    """Where the contributions to what two parts have in common are joined: each candidate joins an
    equal part of it."""
    src, dst = parts.src, parts.dst
    places = dst.places[common.other]
    copies, replicas = np.nonzero(parts.across[places] == common.one)
    contributions: list[int | None]
    if len(copies):
        found = places[copies, replicas]
        contributions = src.contribution_of[parts.src_places[found]].tolist()
    else:
        copy = (common.one + common.other) % len(places)
        found, copies = places[copy], np.full(len(places[copy]), copy)
        contributions = [None] * len(found)
    holders = dst.layout.mesh.holders
    candidates = zip(found.tolist(), contributions, copies.tolist(), strict=True)
    bounds = stripes(0, block_size(common.block), len(found), row_size(common.block))
    return [
        Home(holders[place], contribution, copy, start, stop)
        for (place, contribution, copy), (start, stop) in zip(candidates, bounds, strict=True)
        if start < stop
    ]


def giver(src: Roles, part: int, contribution: int, home: int) -> Holder:
    """Which replica of a contribution to a part goes to the home with number `home`."""
    replicas = src.holders(part, contribution)
    return replicas[(home + contribution) % len(replicas)]
