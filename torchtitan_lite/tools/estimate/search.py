"""The search for the best mesh of a number of ranks: a model in closed form chooses the next mesh,
and only traced meshes are compared.

Which meshes are traced does not depend on the configured mesh, which competes with the best of
them. So a search from its own result has the same result, also if it ends at its limit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.tools.estimate.mesh_step import MEMORY_LIMIT, MeshStep
from torchtitan_lite.tools.estimate.meshes import MeshModel, MeshPrediction

MAX_TRACES = 8
"""Traced meshes of a search."""
MAX_TRACED_LAYERS = 120
"""Layers in all traces of a search. Models whose layers differ are traced with all of them, which
takes seconds per layer; a limit in seconds would let the result depend on the machine."""
_MIN_ROWS = 3
"""Meshes that fit, so that the best one can be compared."""


@dataclass(frozen=True, kw_only=True)
class MeshSearch:
    """The traced meshes, the configured one among them."""

    meshes: tuple[MeshStep, ...]
    """Those that fit the device, best first."""
    too_large: tuple[MeshStep, ...]
    """Those that do not fit, smallest first."""
    is_complete: bool
    """Whether no other mesh is expected to be better; else the search ended at its limit."""


def search_meshes(
    model: MeshModel,
    configured: MeshStep,
    trace: Callable[[ParallelDims], MeshStep],
    world_size: int,
    memory_bytes: float,
    *,
    max_traces: int = MAX_TRACES,
) -> MeshSearch:
    """Search for the mesh of `world_size` ranks with the most tokens per second that fits
    `memory_bytes`. `trace` is called at most `max_traces` times, and not after
    `MAX_TRACED_LAYERS`."""
    traced: dict[ParallelDims, MeshStep] = {}
    following = _following(model, traced, world_size, memory_bytes)
    while (
        following is not None
        and len(traced) < max_traces
        and sum(map(_num_layers, traced.values())) < MAX_TRACED_LAYERS
    ):
        traced[following] = trace(following)
        model.fit(traced[following])
        following = _following(model, traced, world_size, memory_bytes)
    steps = {**traced, configured.degrees: configured}.values()
    return MeshSearch(
        meshes=tuple(sorted((step for step in steps if step.fits(memory_bytes)), key=_rank_of)),
        too_large=tuple(
            sorted((step for step in steps if not step.fits(memory_bytes)), key=_size_of)
        ),
        is_complete=following is None,
    )


def _following(
    model: MeshModel,
    traced: dict[ParallelDims, MeshStep],
    world_size: int,
    memory_bytes: float,
) -> ParallelDims | None:
    """Return the mesh to trace next, or None if no mesh is left. It is the fastest one that is
    predicted to fit and, once `_MIN_ROWS` are traced that fit, to be faster than they. If none
    fits, and none is predicted to fit: the one that is predicted to be smallest, and smaller than
    all traced."""
    fitting = [step for step in traced.values() if step.fits(memory_bytes)]
    predictions = model.predictions(world_size, traced)
    limit = MEMORY_LIMIT * memory_bytes
    candidates = [prediction for prediction in predictions if prediction.peak_bytes <= limit]
    if len(fitting) >= _MIN_ROWS:
        best = min(map(_speed_rank, ((step.degrees, step.time.tokens_per_s) for step in fitting)))
        candidates = [
            candidate for candidate in candidates if _predicted_rank(candidate)[:2] < best
        ]
    chosen = _first_valid(model, sorted(candidates, key=_predicted_rank))
    if chosen is None and not fitting:
        smallest = min((step.fullest.peak_bytes for step in traced.values()), default=float("inf"))
        smaller = [prediction for prediction in predictions if prediction.peak_bytes < smallest]
        chosen = _first_valid(model, sorted(smaller, key=lambda prediction: prediction.peak_bytes))
    return chosen


def _num_layers(step: MeshStep) -> int:
    return sum(sum(rank.traced_blocks) for rank in step.ranks)


def _first_valid(model: MeshModel, predictions: Iterable[MeshPrediction]) -> ParallelDims | None:
    return next(
        (prediction.degrees for prediction in predictions if model.is_valid(prediction.degrees)),
        None,
    )


def _rank_of(step: MeshStep) -> tuple[float, int, float]:
    return (*_speed_rank((step.degrees, step.time.tokens_per_s)), _size_of(step))


def _predicted_rank(prediction: MeshPrediction) -> tuple[float, int, float]:
    return (*_speed_rank((prediction.degrees, prediction.tokens_per_s)), prediction.peak_bytes)


def _size_of(step: MeshStep) -> float:
    return step.fullest.peak_bytes


def _speed_rank(mesh: tuple[ParallelDims, float]) -> tuple[float, int]:
    """Return a key that orders meshes: fast ones first, of equally fast ones the simplest. Speeds
    that agree in three digits are equal, because estimates are not more exact."""
    degrees, tokens_per_s = mesh
    complexity = sum(size > 1 for size in (*degrees.shape, degrees.ep, degrees.etp))
    return -float(f"{tokens_per_s:.3g}"), complexity
