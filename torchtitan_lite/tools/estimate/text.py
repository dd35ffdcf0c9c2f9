"""An estimate as text and as plain values."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.tools.estimate.estimate import Estimate
from torchtitan_lite.tools.estimate.extrapolation import RankStep
from torchtitan_lite.tools.estimate.memory import KINDS
from torchtitan_lite.tools.estimate.mesh_step import MeshStep
from torchtitan_lite.tools.estimate.meshes import DEGREE_KEYS
from torchtitan_lite.tools.estimate.search import MeshSearch
from torchtitan_lite.training.debug.modules import ROOT
from torchtitan_lite.training.debug.table import columns

_GIB = 2**30


def text(estimate: Estimate) -> str:
    """Return the estimate for a terminal."""
    parts = [
        f"Predicted, not measured: {estimate.model} on {estimate.world_size:,} x "
        f"{estimate.device}, mesh {mesh_text(estimate.degrees)}.",
        columns(("", ""), _facts(estimate), numbers=0).strip(),
        f"Memory per rank (GiB) at its peak, {_place(estimate)}:",
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
                        f"{traffic.count:,.0f}",
                        f"{traffic.num_bytes / 1e9:,.3f}",
                        f"{traffic.seconds:.4f}" if estimate.time else "-",
                    )
                    for axis, traffic in estimate.traffic.items()
                ],
                numbers=3,
            ),
        ]
    if estimate.search is not None:
        parts += _search(estimate, estimate.search)
    parts.append(
        "\n".join(("Assumptions:", *(f"- {assumption}" for assumption in estimate.assumptions)))
    )
    return "\n\n".join(parts) + "\n"


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    rank = estimate.fullest
    rows = [
        ("parameters", f"{estimate.num_parameters:,}"),
        ("parameters per rank", f"{max(rank.num_parameters for rank in estimate.ranks):,}"),
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
            _rank_text(rank),
            *(f"{rank.peak.bytes[kind] / _GIB:,.3f}" for kind in KINDS),
            f"{rank.peak_bytes / _GIB:,.3f}",
        )
        for rank in estimate.ranks
    ]


def _place(estimate: Estimate) -> str:
    """Return where the highest peak is."""
    peak = estimate.fullest.peak
    if peak.unit == ROOT:
        return {
            "start": "at the start of the step",
            "reduction": "in the reduction at the end of the step",
            "optimizer": "in the optimizer step",
        }.get(peak.phase, f"in {peak.phase} outside of the layers")
    unit = peak.unit if peak.unit.startswith("layer ") else f"the module {peak.unit}"
    return f"in the {peak.phase} of {unit}"


def _rank_text(rank: RankStep) -> str:
    if rank.num_stages == 1:
        return f"{rank.rank:,}"
    word = "stage" if len(rank.stages) == 1 else "stages"
    numbers = " and ".join(str(stage + 1) for stage in rank.stages)
    return f"{rank.rank:,} ({word} {numbers} of {rank.num_stages})"


def _search(estimate: Estimate, search: MeshSearch) -> list[str]:
    """Return the paragraphs about other meshes."""
    if not search.meshes:
        return [_nothing_fits(estimate, search)]
    shown = [
        *search.meshes,
        *(mesh for mesh in search.too_large if mesh.degrees == estimate.degrees),
    ]
    best = search.meshes[0].degrees
    end = "No other mesh is predicted to be faster."
    if not search.is_complete:
        end = "The search ended at its limit: another mesh may be faster."
    choice = "The configured mesh is the best."
    if best != estimate.degrees:
        choice = f"Select the best: {' '.join(overrides(estimate.degrees, best))}"
    return [
        f"Traced meshes of {estimate.world_size:,} ranks, best first:",
        columns(
            ("mesh", "GiB", "step s", "MFU", "tokens/s", "bubble"),
            [_row(step, estimate, step in search.too_large) for step in shown],
            numbers=5,
        ),
        f"{end}\n{choice}",
    ]


def _nothing_fits(estimate: Estimate, search: MeshSearch) -> str:
    smallest = search.too_large[0]
    end = "No other mesh is predicted to be smaller."
    if not search.is_complete:
        end = "The search ended at its limit: another mesh may fit."
    return (
        f"None of {len(search.too_large)} traced meshes of {estimate.world_size:,} ranks fits "
        f"{estimate.device}. The smallest, {mesh_text(smallest.degrees)}, needs "
        f"{smallest.fullest.peak_bytes / _GIB:,.1f} GiB. {end}\nUse more ranks, a smaller "
        'training.local_batch_size, or activation_checkpoint.mode = "full".'
    )


def _row(step: MeshStep, estimate: Estimate, is_too_large: bool) -> tuple[str, ...]:
    notes = []
    if step.degrees == estimate.degrees:
        notes.append("configured")
    if is_too_large:
        notes.append("does not fit")
    return (
        mesh_text(step.degrees) + (f" ({', '.join(notes)})" if notes else ""),
        f"{step.fullest.peak_bytes / _GIB:.1f}",
        f"{step.time.step_s:.3f}",
        f"{step.time.mfu:.1%}",
        f"{step.time.tokens_per_s:,.0f}",
        f"{step.bubble:.1%}",
    )


def overrides(configured: ParallelDims, best: ParallelDims) -> list[str]:
    """Return the command-line arguments that change the configured mesh to `best`."""
    before = asdict(configured)
    return [
        f"--parallelism.{DEGREE_KEYS[axis]} {size}"
        for axis, size in asdict(best).items()
        if size != before[axis]
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
                "stages": [stage + 1 for stage in rank.stages],
                "num_stages": rank.num_stages,
                "num_parameters": rank.num_parameters,
                "peak_bytes": rank.peak_bytes,
                "peak_bytes_by_kind": dict(rank.peak.bytes),
                "peak_in": [rank.peak.unit, rank.peak.phase],
            }
            for rank in estimate.ranks
        ],
        "communication": {axis: asdict(traffic) for axis, traffic in estimate.traffic.items()},
        "time": None if estimate.time is None else asdict(estimate.time),
        **_search_values(estimate),
        "assumptions": list(estimate.assumptions),
    }


def _search_values(estimate: Estimate) -> dict[str, Any]:
    search = estimate.search
    if search is None:
        return {"best_meshes": None, "search": None}
    best = search.meshes[0].degrees if search.meshes else estimate.degrees
    return {
        "best_meshes": [_mesh_values(step, estimate) for step in search.meshes],
        "search": {
            "is_complete": search.is_complete,
            "overrides": overrides(estimate.degrees, best),
            "too_large": [_mesh_values(step, estimate) for step in search.too_large],
        },
    }


def _mesh_values(step: MeshStep, estimate: Estimate) -> dict[str, Any]:
    return {
        "mesh": asdict(step.degrees),
        "is_configured": step.degrees == estimate.degrees,
        "peak_bytes": step.fullest.peak_bytes,
        "step_s": step.time.step_s,
        "mfu": step.time.mfu,
        "tokens_per_s": step.time.tokens_per_s,
        "bubble": step.bubble,
    }
