"""A plan in words: what happens, what it costs each holder, and what it would cost at least.

Layer: above traffic and means.
"""

from dataclasses import replace
from math import prod
from statistics import median

from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.means import BUCKET_BYTES, Transport
from torchtitan_lite.redistribute.pieces import RoundKind
from torchtitan_lite.redistribute.plan import Plan
from torchtitan_lite.redistribute.traffic import (
    Traffic,
    holders_of,
    lower_bound_bytes,
    temporary_bytes,
    traffic,
)

_MOST_ROWS = 16
"""Holders up to which each has a row."""

_PATHS = {
    "shared_memory": "shared memory, as between CPU ranks of one machine",
    "collective": "all-to-all collectives of a process group",
    None: "shared memory between CPU ranks of one machine, all-to-all collectives elsewhere",
}


def explain(
    plan: Plan, *, transport: Transport | None = None, bucket_bytes: int = BUCKET_BYTES
) -> str:
    """What a plan does, in lines. `transport` is the path that will be taken, where that is known,
    and `bucket_bytes` what `Means` says."""
    # Each section is a list of lines; what else a plan knows of itself becomes one more.
    sections = [
        _ends(plan),
        _legs(plan) or _rounds(plan),
        _bytes_moved(plan),
        _memory(plan, bucket_bytes),
        [f"Path: {_path(plan, transport)}"],
        [f"Predicted time: {plan.predicted_s * 1e3:.3g} ms"],
    ]
    return "\n".join(line for section in sections for line in section)


def in_units(count: float) -> str:
    """Bytes as people write them: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            # Three digits of 1000 and more would be written 1.02e+03.
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _ends(plan: Plan) -> list[str]:
    shape = " x ".join(map(str, plan.shape)) or "scalar"
    dtype = str(plan.dtype).removeprefix("torch.")
    return [
        f"Tensor: {shape}, {dtype}, {in_units(prod(plan.shape) * plan.dtype.itemsize)}",
        f"From: {plan.src}",
        f"To: {plan.dst}",
    ]


def _path(plan: Plan, transport: Transport | None) -> str:
    if plan.moved_bytes == 0:
        return "none, nothing is moved"
    if any(not isinstance(leg, Plan) for leg in plan.legs):
        return "single collectives of the backend where they are named"
    return _PATHS[transport]


def _legs(plan: Plan) -> list[str]:
    """What is done in place of one exchange, if that is faster."""
    lines = []
    for number, leg in enumerate(plan.legs, 1):
        if isinstance(leg, Plan):
            did, seconds = "exchange", leg.predicted_s
        else:
            axes = ", ".join(leg.src.mesh.axes[axis] for axis in leg.axes)
            did, seconds = f"{leg.kind} over {axes}", leg.seconds(plan.costs)
        lines.append(
            f"Step {number}, {did}: to {leg.dst}, {in_units(leg.moved_bytes)} moved in all, "
            f"{seconds * 1e3:.3g} ms"
        )
    if lines:
        exchange_s = replace(plan, legs=()).predicted_s
        lines.append(f"One exchange in place of that would take {exchange_s * 1e3:.3g} ms.")
    return lines


def _rounds(plan: Plan) -> list[str]:
    if plan.is_nothing:
        return ["Nothing to do: both layouts are the same."]
    lines = [
        f"Round {number}, {kind}: {_in_words(plan, kind)}"
        for number, kind in enumerate(plan.rounds, 1)
    ]
    if plan.factor != 1:
        lines.append(f"At last the result is multiplied by {plan.factor:g}, for the averages.")
    return lines


def _in_words(plan: Plan, kind: RoundKind) -> str:
    exchange = plan.exchange
    count = exchange.src.num_contributions
    if kind == "reduce":
        if exchange.dst.num_contributions == 1:
            return (
                f"the {count} contributions to an element are reduced ({plan.op}) by a holder that "
                "needs it"
            )
        return (
            f"the {count} contributions to an element become at most "
            f"{exchange.dst.num_contributions} ({plan.op}), each on a holder that needs it"
        )
    if kind == "spread":
        return f"from there it goes to the {exchange.dst.num_replicas - 1} others that need it"
    if plan.moved_bytes == 0:
        words = "every holder copies what it needs from what it has"
    else:
        words = "every holder gets what it lacks from one that has it"
    if exchange.dst.num_contributions > 1:
        words += (
            "; one contribution has the value, the others are empty"
            if count == 1
            else f"; the {count} contributions to an element stay apart"
        )
    return words


def _bytes_moved(plan: Plan) -> list[str]:
    least = lower_bound_bytes(plan)
    if least is None:
        compared = "no lower bound is known to contributions as a destination"
    elif least == plan.moved_bytes:
        compared = "that is the lower bound"
    else:
        compared = f"the lower bound is {least:,}"
    lines = [f"Moved in all: {_count(plan.moved_bytes)}; {compared}."]
    if plan.legs:
        return lines
    found = traffic(plan)
    if plan.moved_bytes:
        sender = max(found, key=lambda holder: found[holder].sent)
        receiver = max(found, key=lambda holder: found[holder].received)
        lines += [
            f"Busiest sender: {sender}, {_count(found[sender].sent)}",
            f"Busiest receiver: {receiver}, {_count(found[receiver].received)}",
        ]
    return lines + (_table(found) if len(found) <= _MOST_ROWS else _summary(found))


def _count(count: int) -> str:
    return f"{count:,} bytes" + (f" ({in_units(count)})" if count >= 1024 else "")


def _table(found: dict[Holder, Traffic]) -> list[str]:
    rows = [("holder", "sends", "receives", "keeps", "has then")]
    rows += [
        (str(holder), f"{t.sent:,}", f"{t.received:,}", f"{t.stays:,}", f"{t.result:,}")
        for holder, t in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _summary(found: dict[Holder, Traffic]) -> list[str]:
    """Of holders too many for a table."""
    sent = [t.sent for t in found.values()]
    received = [t.received for t in found.values()]
    idle = sum(t.sent == t.received == 0 for t in found.values())
    return [
        f"Median of {len(found)} holders: sends {in_units(median(sent))}, receives "
        f"{in_units(median(received))}; {idle} neither send nor receive",
    ]


def _memory(plan: Plan, bucket_bytes: int) -> list[str]:
    needed = temporary_bytes(plan, bucket_bytes)
    size = prod(plan.shape) * plan.dtype.itemsize
    shapes = [plan.local_shape(h) for h in holders_of(plan) if plan.dst.mesh.place(h) is not None]
    result = max(prod(shape) for shape in shapes) * plan.dtype.itemsize
    buckets = f" (two buckets of {in_units(bucket_bytes)})" if needed == 2 * bucket_bytes else ""
    part = "the whole tensor" if result == size else "the largest part"
    return [
        f"Temporary memory of a holder: at most {in_units(needed)}{buckets}, beside the result, "
        f"{in_units(result)} for {part}"
    ]
