"""A model of memory and time of a mesh in closed form: it chooses which meshes are traced.

It has the terms of the trace. Each term of a mesh is scaled as on the nearest traced mesh that has
it, so that the model agrees with every trace in its terms.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace

from torchtitan_lite.config import Config
from torchtitan_lite.data import batch_sizes
from torchtitan_lite.distributed.device import LOGITS_PER_CHUNK, Accelerator
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.tools.estimate.memory import KINDS, Kind
from torchtitan_lite.tools.estimate.mesh_step import MeshStep
from torchtitan_lite.tools.estimate.trace import CPU_DEVICE
from torchtitan_lite.tools.estimate.work import (
    MATMUL_EFFICIENCY,
    TRAFFIC_EFFICIENCY,
    collective_seconds,
)
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.checks.mesh_constraints import mesh_problems

DEGREE_KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
"""Keys of [parallelism] by axis."""
_MIN_CHUNK = 512
"""Tokens of a chunk of the loss (`loss.py`)."""
_MAX_BUBBLE = 0.95
"""A scaled bubble must leave some of the time for work."""
_SLOTS = 2
"""Optimizer state per parameter before a trace tells: AdamW's."""
_PIPELINE_DISTANCE = 4.0
"""Between a mesh with a pipeline and one without, whose memory differs in kind."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model and its training that the terms need."""

    block: float
    """Parameters of a block without its experts."""
    experts: float
    """Parameters of the experts of a block."""
    embedding: float
    output: float
    num_blocks: int
    width: int
    state_width: float
    """Numbers per position that context parallelism gathers in a block."""
    vocab_size: int
    choices: int
    """Experts per token."""
    parameter_bytes: int
    compute_bytes: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """A mesh with its predicted memory and speed."""

    degrees: ParallelDims
    peak_bytes: float
    tokens_per_s: float


def sizes_of(config: Config, spec: ModelSpec) -> ModelSizes:
    """Return the sizes of a model."""
    prefix = spec.blocks.removesuffix("*")
    counts = {"block": 0, "experts": 0, "embedding": 0, "output": 0}
    item = 4
    for name, parameter in model_on_meta(config, spec).named_parameters():
        item = parameter.element_size()
        if name.startswith(prefix):
            counts["experts" if ".experts." in name else "block"] += parameter.numel()
        elif spec.stage_units and name.startswith(spec.stage_units[0]):
            counts["embedding"] += parameter.numel()
        else:
            counts["output"] += parameter.numel()
    moe = getattr(spec.dims, "moe", None)
    return ModelSizes(
        block=counts["block"] / spec.num_layers,
        experts=counts["experts"] / spec.num_layers,
        embedding=counts["embedding"],
        output=counts["output"],
        num_blocks=spec.num_layers,
        width=spec.width,
        state_width=max((attention.state_width for attention in spec.attentions), default=0),
        vocab_size=spec.vocab_size,
        choices=getattr(moe, "top_k", 0),
        parameter_bytes=item,
        compute_bytes=precision_policy(config.training, CPU_DEVICE).compute.itemsize,
        flops_per_token=spec.cost(config.training.seq_len).flops_per_token,
    )


def with_degrees(config: Config, degrees: ParallelDims) -> Config:
    """Return `config` with other degrees."""
    values = {DEGREE_KEYS[axis]: size for axis, size in asdict(degrees).items()}
    parallelism = config.parallelism.model_copy(update=values)
    return config.model_copy(update={"parallelism": parallelism})


class MeshModel:
    """Predicts memory and speed of the valid meshes of a number of ranks."""

    def __init__(
        self, config: Config, spec: ModelSpec, sizes: ModelSizes, accelerator: Accelerator
    ) -> None:
        self._config = config
        self._spec = spec
        self._sizes = sizes
        self._accelerator = accelerator
        self._terms: dict[ParallelDims, dict[str, float]] = {}
        """Memory and seconds of the candidates by kind, not scaled."""
        self._factors: dict[ParallelDims, dict[str, float]] = {}
        """Traced over predicted value of the traced meshes, for each term of the mesh."""
        self._is_valid: dict[ParallelDims, bool] = {}

    def fit(self, step: MeshStep) -> None:
        """Scale the terms of meshes near that of `step` so that they agree with it."""
        raw = self._raw(step.degrees)
        slowest = max(step.ranks, key=lambda rank: rank.schedule.seconds).schedule
        traced: dict[str, float] = {
            **step.fullest.peak.bytes,
            "compute": slowest.compute_s,
            "hidden": slowest.communication_s(overlapped=True),
            "exposed": slowest.communication_s(overlapped=False),
            "bubble": step.bubble,
            "update": step.time.update_s,
        }
        self._factors[step.degrees] = {
            term: traced[term] / value for term, value in raw.items() if value
        }

    def predict(self, degrees: ParallelDims) -> MeshPrediction:
        """Predict a mesh. It may be an invalid one."""
        # Among equally near meshes, the one that was traced first wins.
        nearest = sorted(self._factors, key=lambda traced: _distance(traced, degrees))
        factors_by_distance = [self._factors[traced] for traced in nearest]
        term = {
            name: value
            * next((factors[name] for factors in factors_by_distance if name in factors), 1.0)
            for name, value in self._raw(degrees).items()
        }
        bubble = min(term["bubble"], _MAX_BUBBLE)
        busy_s = max(term["compute"], term["hidden"]) + term["exposed"]
        tokens = self._samples(degrees) * self._config.training.seq_len
        return MeshPrediction(
            degrees=degrees,
            peak_bytes=sum(term[kind] for kind in KINDS),
            tokens_per_s=tokens / (busy_s / (1 - bubble) + term["update"]),
        )

    def predictions(
        self, world_size: int, skipped: Collection[ParallelDims]
    ) -> list[MeshPrediction]:
        """Predict all meshes of `world_size` ranks but `skipped`. Some of them may be invalid."""
        if not self._terms:
            self._terms = {
                candidate: self._compute_terms(candidate)
                for candidate in self._candidates(world_size)
            }
        return [self.predict(term) for term in self._terms if term not in skipped]

    def is_valid(self, degrees: ParallelDims) -> bool:
        """Whether the configuration allows the mesh."""
        if degrees not in self._is_valid:
            problems = mesh_problems(with_degrees(self._config, degrees), self._spec, degrees)
            self._is_valid[degrees] = next(problems, None) is None
        return self._is_valid[degrees]

    def _raw(self, degrees: ParallelDims) -> dict[str, float]:
        return self._terms.get(degrees) or self._compute_terms(degrees)

    def _compute_terms(self, degrees: ParallelDims) -> dict[str, float]:
        compute_s = self._flops(degrees) / (MATMUL_EFFICIENCY * self._accelerator.peak_flops)
        hidden_s, exposed_s = self._communication(degrees)
        num_bytes = self._bytes(degrees)
        # Weights, gradients and state are read, and all but gradients are written.
        moved = 3 * num_bytes["weights"] + 2 * num_bytes["optimizer"]
        update_s = moved / (TRAFFIC_EFFICIENCY * self._accelerator.memory_bytes_per_s)
        return {
            **num_bytes,
            "compute": compute_s,
            "hidden": hidden_s,
            "exposed": exposed_s,
            "bubble": self._bubble(degrees),
            "update": update_s,
        }

    def _num_microbatches(self, degrees: ParallelDims) -> int:
        """Return the microbatches per rank and step; 0 if they do not divide the batch."""
        at_once = self._samples_at_once(degrees) * degrees.batch
        samples = self._samples(degrees)
        return 0 if samples % at_once else samples // at_once

    def _candidates(self, world_size: int) -> Iterator[ParallelDims]:
        """Yield meshes whose batch divides. Tensor parallelism stays within a node."""
        parallelism = self._config.parallelism
        experts = self._spec.num_experts
        tps = [d for d in _divisors(world_size) if d <= self._accelerator.per_node]
        for tp in tps if self._spec.shard_plan else [1]:
            if any(size % tp for _, size in self._spec.sharded_sizes):
                continue
            for pp in _divisors(world_size // tp):
                if pp > self._sizes.num_blocks or (pp > 1 and not self._spec.stage_units):
                    continue
                for cp in _divisors(world_size // tp // pp):
                    if self._config.training.seq_len % (2 * cp * tp) and cp > 1:
                        continue
                    for shard in _divisors(world_size // tp // pp // cp):
                        dense = ParallelDims(
                            pp=pp,
                            cp=cp,
                            tp=tp,
                            dp_shard=shard,
                            dp_replicate=world_size // tp // pp // cp // shard,
                            etp=parallelism.expert_tensor_parallel_degree,
                        )
                        num = self._num_microbatches(dense)
                        if num == 0 or num < pp:
                            continue
                        sharing = shard * cp * tp
                        eps = [d for d in _divisors(experts) if sharing % (d * dense.etp) == 0]
                        yield from (replace(dense, ep=ep) for ep in (eps if experts else [1]))

    def _samples(self, degrees: ParallelDims) -> int:
        return batch_sizes(self._config.training, degrees.batch).final

    def _samples_at_once(self, degrees: ParallelDims) -> int:
        if degrees.pp > 1:
            return self._config.parallelism.pipeline_parallel_microbatch_size
        return self._config.training.local_batch_size

    def _blocks(self, degrees: ParallelDims) -> float:
        """Blocks of the longest stages, which compute most."""
        if degrees.pp == 1:
            return self._sizes.num_blocks
        parallelism = self._config.parallelism
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        return -(-(self._sizes.num_blocks + first + last) // degrees.pp)

    def _tokens(self, degrees: ParallelDims) -> float:
        """Tokens of a microbatch on a rank, as they are between the matrices."""
        tokens = self._samples_at_once(degrees) * self._config.training.seq_len / degrees.cp
        sequence = self._config.parallelism.enable_sequence_parallel
        return tokens / degrees.tp if sequence else tokens

    def _flops(self, degrees: ParallelDims) -> float:
        """FLOPs of the rank with most of them, of the model without recomputation."""
        tokens = self._samples(degrees) * self._config.training.seq_len
        ranks = degrees.batch * degrees.token_copies
        return self._sizes.flops_per_token * tokens / ranks * self._imbalance(degrees)

    def _imbalance(self, degrees: ParallelDims) -> float:
        """Work of the longest stage over the mean, with the output as the layers it counts for."""
        parallelism = self._config.parallelism
        counted = self._sizes.num_blocks + (
            parallelism.pipeline_parallel_last_stage_less_layers if degrees.pp > 1 else 0
        )
        return max(1.0, self._blocks(degrees) * degrees.pp / counted)

    def _bubble(self, degrees: ParallelDims) -> float:
        if degrees.pp == 1:
            return 0.0
        schedule = self._config.parallelism.pipeline_parallel_schedule.lower()
        per_rank = 1 if schedule in ("1f1b", "gpipe") else 2
        num = self._num_microbatches(degrees) * per_rank
        return (degrees.pp - 1) / (num + degrees.pp - 1)

    def _bytes(self, degrees: ParallelDims) -> dict[Kind, float]:
        sizes = self._sizes
        blocks, sharing = self._blocks(degrees), degrees.dp_shard * degrees.cp * degrees.tp
        ends = sizes.embedding + sizes.output
        if degrees.pp > 1:
            blocks -= self._config.parallelism.pipeline_parallel_first_stage_less_layers
            ends = max(sizes.embedding, sizes.output)
        shard = blocks * (sizes.block + sizes.experts) + ends
        weights = shard / sharing * sizes.parameter_bytes
        unit = sizes.block / degrees.tp + sizes.experts / (degrees.ep * degrees.etp)
        end = max(sizes.embedding, sizes.output) / degrees.tp
        item = sizes.compute_bytes
        if degrees.pp > 1:
            # All weights stay gathered, and gradients wait for the last microbatch.
            buffers = (blocks * unit + end) * item
            waiting = buffers
        else:
            # Two units are gathered at once, and one is reduced, at least in float32.
            buffers = (2 * unit + end) * item + max(unit, end) * 4
            waiting = max(unit, end) * item
        in_flight = min(degrees.pp, max(1, self._num_microbatches(degrees)))
        if self._config.parallelism.pipeline_parallel_schedule.lower() in ("gpipe", "loopedbfs"):
            in_flight = max(1, self._num_microbatches(degrees))
        activations = self._tokens(degrees) * sizes.width * item * (blocks + 4) * in_flight
        rows = sizes.vocab_size / degrees.tp
        chunk = max(_MIN_CHUNK, LOGITS_PER_CHUNK["cuda"] / rows)
        tokens = self._tokens(degrees) * degrees.tp
        logits = min(chunk, tokens) * rows * 8 + rows * sizes.width * (item + 4)
        return {
            "weights": weights,
            "optimizer": weights * _SLOTS,
            "gradients": weights + waiting,
            "buffers": buffers,
            "activations": activations,
            "logits": logits if degrees.pp == 1 else 0.0,
        }

    def _communication(self, degrees: ParallelDims) -> tuple[float, float]:
        """Return the seconds per rank and step of FSDP's collectives, and of all others that a rank
        waits for."""
        sizes, num = self._sizes, max(1, self._num_microbatches(degrees))
        blocks, item = self._blocks(degrees), self._sizes.compute_bytes
        ends = (sizes.embedding + sizes.output) / degrees.tp / degrees.pp
        dense = blocks * sizes.block / degrees.tp + ends
        experts = blocks * sizes.experts / (degrees.ep * degrees.etp)
        # Without a pipeline every microbatch gathers twice and reduces once.
        gathers, reductions = (1, 1) if degrees.pp > 1 else (2 * num, num)
        sharers = degrees.dp_shard * degrees.cp
        expert_sharers = degrees.expert_shape[2]
        hidden = self._seconds(
            "all_gather", dense * item * gathers, sharers, degrees.tp, blocks * gathers
        ) + self._seconds(
            "reduce_scatter", dense * 4 * reductions, sharers, degrees.tp, blocks * reductions
        )
        hidden += self._seconds(
            "all_gather",
            experts * (item * gathers + 4 * reductions),
            expert_sharers,
            degrees.ep * degrees.etp,
            blocks,
        )
        hidden += self._seconds(
            "all_reduce",
            (dense + experts) * 4 / max(1, sharers),
            degrees.dp_replicate,
            sharers * degrees.tp,
            blocks,
        )
        tokens = self._samples_at_once(degrees) * self._config.training.seq_len / degrees.cp
        passes = 2 if self._config.activation_checkpoint.mode == "none" else 3
        hidden_states = tokens * sizes.width * item
        exposed = self._seconds(
            "all_gather",
            hidden_states * 4 * passes * blocks * num,
            degrees.tp,
            1,
            4 * passes * blocks * num,
        )
        keys = tokens * degrees.cp * sizes.state_width / degrees.tp * item
        exposed += self._seconds(
            "all_gather",
            keys * passes * blocks * num,
            degrees.cp,
            degrees.tp,
            passes * blocks * num,
        )
        copies = self._tokens(degrees) * sizes.choices * sizes.width * item
        exposed += self._seconds(
            "all_to_all",
            copies * 2 * passes * blocks * num,
            degrees.ep * degrees.etp,
            1,
            2 * passes * blocks * num,
        )
        return hidden, exposed

    def _seconds(
        self, operation: str, num_bytes: float, size: int, stride: int, count: float
    ) -> float:
        """Return the seconds of `count` collectives, of `num_bytes` in all, over ranks that are
        `stride` apart."""
        if size == 1 or num_bytes == 0:
            return 0.0
        near = min(size, max(1, self._accelerator.per_node // stride))
        each = collective_seconds(operation, num_bytes / count, size, near, self._accelerator)
        return each * count


def _distance(first: ParallelDims, second: ParallelDims) -> float:
    """Return how different two meshes are: doublings of degrees."""
    sizes = zip(_sizes(first), _sizes(second), strict=True)
    doublings = sum(abs(math.log2(a / b)) for a, b in sizes)
    return doublings + _PIPELINE_DISTANCE * ((first.pp > 1) != (second.pp > 1))


def _sizes(degrees: ParallelDims) -> tuple[int, ...]:
    return (*degrees.shape, degrees.ep, degrees.etp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
