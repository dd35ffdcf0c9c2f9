"""A plan as text: its rounds, the bytes of each holder, the lower bound and memory.

Invariant: `lower_bound_bytes` is computed from the layouts alone, so it can verify a plan.
"""

from dataclasses import dataclass
from math import prod
from statistics import median

from torchtitan_lite.distributed.redistribute.planning.cost import BUCKET_BYTES, Transport
from torchtitan_lite.distributed.redistribute.planning.layout import Layout
from torchtitan_lite.distributed.redistribute.planning.partition import intervals
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.plan import Plan
from torchtitan_lite.distributed.redistribute.planning.transfers import (
    RoundKind,
    RoundTransfers,
    Transfer,
)

_MOST_ROWS = 16
"""Maximum holders with a row each."""

_PATHS = {
    "shared_memory": "shared memory, as between CPU ranks of one machine",
    "collective": "all-to-all collectives of a process group",
    None: "shared memory between CPU ranks of one machine, all-to-all collectives elsewhere",
}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one holder, in all rounds."""

    sent: int
    received: int
    stays: int
    """Source bytes that it copies locally."""
    result: int
    """Bytes of its shard of the destination."""


def explain(
    plan: Plan, *, transport: Transport | None = None, bucket_bytes: int = BUCKET_BYTES
) -> str:
    """Explain a plan as text. `transport` is the transport, if known, and `bucket_bytes` that of
    `ExchangeOptions`."""
    # Each section is a list of lines; what else a plan knows of itself becomes one more.
    sections = [
        _ends(plan),
        _rounds(plan),
        _bytes_moved(plan),
        _memory(plan, bucket_bytes),
        [f"Path: {_path(plan, transport)}"],
    ]
    return "\n".join(line for section in sections for line in section)


def traffic(plan: Plan) -> dict[Holder, Traffic]:
    """Return what each holder of a plan sends and receives."""
    return {holder: _traffic(plan, holder) for holder in holders_of(plan)}


def temporary_bytes(plan: Plan, bucket_bytes: int) -> int:
    """Return the maximum temporary bytes of a holder: two buckets, or the volume of the busiest
    round if less."""
    if plan.moved_bytes == 0:
        return 0

    def load(part: RoundTransfers) -> int:
        return _bytes(plan, part.sends) + _bytes(plan, part.receives)

    busiest = max(load(part) for holder in holders_of(plan) for part in plan.transfers(holder))
    return min(busiest, 2 * bucket_bytes)


def lower_bound_bytes(plan: Plan) -> int | None:
    """Return the lower bound of bytes between holders; None if the destination has partial values,
    whose value may be with any of them.

    Without partial values, a holder lacks what it does not have. With p of them and n destinations,
    n - 1 holders receive an element after p - 1 contributions reached a contributor that is a
    destination; without such a holder, one more is sent.
    """
    src, dst, shape = plan.src, plan.dst, plan.shape
    if plan.is_noop:
        return 0
    if _size(dst, dst.partial_axes) > 1:
        return None
    whole, itemsize = prod(shape), plan.dtype.itemsize
    cutting = [split.axis for splits in dst.splits.values() for split in splits]
    replicas = _size(dst, [a for a in range(len(dst.mesh.shape)) if a not in cutting])
    contributions = _size(src, src.partial_axes)
    # By part of either layout: what a holder of both already has.
    common: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    saved = 0
    for holder in dst.mesh.holders:
        src_coordinate, dst_coordinate = src.mesh.coordinate(holder), dst.mesh.coordinate(holder)
        if src_coordinate is None or dst_coordinate is None:
            continue
        parts = _parts(src, len(shape), src_coordinate), _parts(dst, len(shape), dst_coordinate)
        if parts not in common:
            common[parts] = _common(plan, *parts)
            saved += common[parts] if contributions > 1 else 0
        saved += common[parts] if contributions == 1 else 0
    return (whole * (contributions - 1 + replicas) - saved) * itemsize


def holders_of(plan: Plan) -> tuple[Holder, ...]:
    """Return all holders of either layout, those of the source first."""
    return tuple(dict.fromkeys((*plan.src.mesh.holders, *plan.dst.mesh.holders)))


def format_bytes(count: float) -> str:
    """Format bytes, such as 1.5 MiB."""
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
        f"Tensor: {shape}, {dtype}, {format_bytes(prod(plan.shape) * plan.dtype.itemsize)}",
        f"From: {plan.src}",
        f"To: {plan.dst}",
    ]


def _path(plan: Plan, transport: Transport | None) -> str:
    if plan.moved_bytes == 0:
        return "none, nothing is moved"
    return _PATHS[transport]


def _rounds(plan: Plan) -> list[str]:
    if plan.is_noop:
        return ["Nothing to do: both layouts are the same."]
    lines = [
        f"Round {number}, {kind}: {_describe_round(plan, kind)}"
        for number, kind in enumerate(plan.rounds, 1)
    ]
    if plan.factor != 1:
        lines.append(f"At last the result is multiplied by {plan.factor:g}, for the averages.")
    return lines


def _describe_round(plan: Plan, kind: RoundKind) -> str:
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
    if kind == "broadcast":
        return f"from there to the {exchange.dst.num_replicas - 1} other replicas that need it"
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
    lines = [f"Total moved: {_count(plan.moved_bytes)}; {compared}."]
    by_holder = traffic(plan)
    if plan.moved_bytes:
        sender = max(by_holder, key=lambda holder: by_holder[holder].sent)
        receiver = max(by_holder, key=lambda holder: by_holder[holder].received)
        lines += [
            f"Busiest sender: {sender}, {_count(by_holder[sender].sent)}",
            f"Busiest receiver: {receiver}, {_count(by_holder[receiver].received)}",
        ]
    return lines + (_table(by_holder) if len(by_holder) <= _MOST_ROWS else _summary(by_holder))


def _count(count: int) -> str:
    return f"{count:,} bytes" + (f" ({format_bytes(count)})" if count >= 1024 else "")


def _table(by_holder: dict[Holder, Traffic]) -> list[str]:
    rows = [("holder", "sends", "receives", "keeps", "has then")]
    rows += [
        (str(holder), f"{t.sent:,}", f"{t.received:,}", f"{t.stays:,}", f"{t.result:,}")
        for holder, t in by_holder.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _summary(by_holder: dict[Holder, Traffic]) -> list[str]:
    """Summarize holders that are too many for a table."""
    sent = [t.sent for t in by_holder.values()]
    received = [t.received for t in by_holder.values()]
    idle = sum(t.sent == t.received == 0 for t in by_holder.values())
    return [
        f"Median of {len(by_holder)} holders: sends {format_bytes(median(sent))}, receives "
        f"{format_bytes(median(received))}; {idle} neither send nor receive",
    ]


def _memory(plan: Plan, bucket_bytes: int) -> list[str]:
    needed = temporary_bytes(plan, bucket_bytes)
    size = prod(plan.shape) * plan.dtype.itemsize
    shapes = [
        plan.local_shape(h) for h in holders_of(plan) if plan.dst.mesh.position(h) is not None
    ]
    result = max(prod(shape) for shape in shapes) * plan.dtype.itemsize
    buckets = (
        f" (two buckets of {format_bytes(bucket_bytes)})" if needed == 2 * bucket_bytes else ""
    )
    part = "the whole tensor" if result == size else "the largest part"
    return [
        f"Temporary memory of a holder: at most {format_bytes(needed)}{buckets}, beside the "
        f"result, {format_bytes(result)} for {part}"
    ]


def _traffic(plan: Plan, holder: Holder) -> Traffic:
    result = 0
    if plan.dst.mesh.position(holder) is not None:
        result = prod(plan.local_shape(holder)) * plan.dtype.itemsize
    if plan.is_noop:
        return Traffic(sent=0, received=0, stays=result, result=result)
    parts = plan.transfers(holder)
    return Traffic(
        sent=sum(_bytes(plan, part.sends) for part in parts),
        received=sum(_bytes(plan, part.receives) for part in parts),
        stays=sum(_bytes(plan, part.copies) for part in parts),
        result=result,
    )


def _bytes(plan: Plan, pieces: list[Transfer]) -> int:
    return sum(piece.stop - piece.start for piece in pieces) * plan.dtype.itemsize


def _size(layout: Layout, axes: list[int] | tuple[int, ...]) -> int:
    return prod(layout.mesh.shape[axis] for axis in axes)


def _parts(layout: Layout, ndim: int, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layout.shard_index(dim, coordinate) for dim in range(ndim))


def _common(plan: Plan, src_coordinate: tuple[int, ...], dst_coordinate: tuple[int, ...]) -> int:
    """Return the elements that a shard of the source and one of the destination share."""
    common = 1
    for dim, length in enumerate(plan.shape):
        src_intervals = intervals(length, plan.src.splits.get(dim, ()), src_coordinate[dim])
        dst_intervals = intervals(length, plan.dst.splits.get(dim, ()), dst_coordinate[dim])
        common *= sum(
            max(0, min(a + m, b + n) - max(a, b))
            for a, m in src_intervals
            for b, n in dst_intervals
            if m and n
        )
    return common
