"""An estimate as text and as plain values. Layer: `estimate.estimate`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchtitan_lite.debug.table import columns
from torchtitan_lite.estimate.estimate import Estimate
from torchtitan_lite.estimate.memory import KINDS
from torchtitan_lite.mesh import ParallelDims

_GIB = 2**30


def text(estimate: Estimate) -> str:
    """Return the estimate for a terminal."""
    peak = estimate.fullest.peak
    parts = [
        f"Predicted, not measured: {estimate.model} on {estimate.world_size:,} x "
        f"{estimate.device}, mesh {mesh_text(estimate.degrees)}.",
        columns(("", ""), _facts(estimate), numbers=0).strip(),
        f"Memory per rank (GiB) at its peak, in the {peak.phase} of {peak.unit}:",
        columns(("rank", *KINDS, "total"), _memory(estimate), numbers=len(KINDS) + 1),
    ]
    if estimate.traffic:
        parts += [
            "Communication per rank and step:",
            columns(
                ("axis", "collectives", "GB", "seconds"),
                [
                    (
                        axis,
                        f"{one.count:,.0f}",
                        f"{one.num_bytes / 1e9:,.3f}",
                        f"{one.seconds:.4f}" if estimate.time else "-",
                    )
                    for axis, one in estimate.traffic.items()
                ],
                numbers=3,
            ),
        ]
    if estimate.meshes:
        parts += [
            f"The best meshes that fit, by the model in closed form for {estimate.world_size:,} "
            "ranks:",
            columns(
                ("mesh", "GiB", "step s", "MFU", "tokens/s", "bubble"),
                [
                    (
                        mesh_text(one.degrees),
                        f"{one.peak_bytes / _GIB:.1f}",
                        f"{one.step_s:.3f}",
                        f"{one.mfu:.1%}",
                        f"{one.tokens_per_s:,.0f}",
                        f"{one.bubble:.1%}",
                    )
                    for one in estimate.meshes
                ],
                numbers=5,
            ),
        ]
    elif estimate.time is not None:
        parts.append("No mesh of the configured batch fits the device.")
    parts.append("\n".join(("Assumptions:", *(f"- {one}" for one in estimate.assumptions))))
    return "\n\n".join(parts) + "\n"


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    rank = estimate.fullest
    rows = [
        ("parameters", f"{estimate.num_parameters:,}"),
        ("parameters per rank", f"{max(one.num_parameters for one in estimate.ranks):,}"),
        ("checkpoint", f"{estimate.checkpoint_bytes / 1e9:,.2f} GB"),
        ("microbatches per step", f"{estimate.num_microbatches:,}"),
        ("tokens per step", f"{estimate.tokens_per_step:,}"),
        ("FLOPs per rank and step", f"{estimate.flops:.3e}"),
        ("peak memory per rank", f"{rank.peak_bytes / _GIB:,.3f} GiB"),
    ]
    if estimate.host_bytes:
        rows.append(("host memory per rank", f"{estimate.host_bytes / _GIB:,.3f} GiB"))
    if estimate.memory_bytes is not None:
        verdict = "yes" if estimate.fits else "NO"
        rows.append(
            (f"fits {estimate.device}", f"{verdict} ({estimate.memory_bytes / _GIB:,.1f} GiB)")
        )
    if estimate.degrees.pp > 1:
        rows.append(("pipeline bubble", f"{estimate.bubble:.1%}"))
    if estimate.time is not None:
        time = estimate.time
        rows += [
            (
                "step",
                f"{time.step_s:.3f} s: computation {time.compute_s:.3f}, exposed communication "
                f"{time.exposed_s:.3f}, bubble {time.bubble_s:.3f}, update {time.update_s:.3f}",
            ),
            ("MFU", f"{time.mfu:.1%}"),
            ("tokens per second", f"{time.tokens_per_s:,.0f}"),
        ]
    return rows


def _memory(estimate: Estimate) -> list[tuple[str, ...]]:
    return [
        (
            f"{rank.rank:,}",
            *(f"{rank.peak.bytes[kind] / _GIB:,.3f}" for kind in KINDS),
            f"{rank.peak_bytes / _GIB:,.3f}",
        )
        for rank in estimate.ranks
    ]


def mesh_text(degrees: ParallelDims) -> str:
    """Return the degrees above 1."""
    sizes: Sequence[tuple[str, int]] = tuple(asdict(degrees).items())
    return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "of one rank"


def as_values(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as values for JSON."""
    return {
        "model": estimate.model,
        "device": estimate.device,
        "world_size": estimate.world_size,
        "mesh": asdict(estimate.degrees),
        "num_parameters": estimate.num_parameters,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "num_microbatches": estimate.num_microbatches,
        "tokens_per_step": estimate.tokens_per_step,
        "flops_per_rank": estimate.flops,
        "bubble": estimate.bubble,
        "fits": estimate.fits,
        "host_bytes": estimate.host_bytes,
        "ranks": [
            {
                "rank": rank.rank,
                "num_parameters": rank.num_parameters,
                "peak_bytes": rank.peak_bytes,
                "peak_bytes_by_kind": dict(rank.peak.bytes),
                "peak_in": [rank.peak.unit, rank.peak.phase],
            }
            for rank in estimate.ranks
        ],
        "communication": {axis: asdict(one) for axis, one in estimate.traffic.items()},
        "time": None if estimate.time is None else asdict(estimate.time),
        "best_meshes": [
            {
                "mesh": asdict(one.degrees),
                "peak_bytes": one.peak_bytes,
                "step_s": one.step_s,
                "mfu": one.mfu,
                "tokens_per_s": one.tokens_per_s,
            }
            for one in estimate.meshes
        ],
        "assumptions": list(estimate.assumptions),
    }
