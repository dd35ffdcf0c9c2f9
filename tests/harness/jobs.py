"""Small real jobs for tests: a model with odd sizes on the text fixture, trained in the workers of
a pool."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims, resolve_degrees
from torchtitan_lite.distributed.redistribute import local_box
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.models import auto, deepseek_v3, gpt_oss, llama3, llama4, qwen3, qwen3_next
from torchtitan_lite.models.llama3 import Llama3Dims
from torchtitan_lite.models.qwen3 import Qwen3Dims
from torchtitan_lite.nn.grouped_query import Temperature
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.norm import NormKind
from torchtitan_lite.nn.rope import LinearScaling, LongRopeScaling, RopeBase, YarnScaling
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import config_from
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

_SIZES = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_dim", "vocab_size")


def qwen3_like(dims: Llama3Dims, **changes: Any) -> Qwen3Dims:
    """Dimensions of a Qwen3 with the sizes of a Llama, except for `changes`."""
    return Qwen3Dims(**{name: getattr(dims, name) for name in _SIZES} | changes)


FIXTURE = Path(__file__).parents[1] / "assets" / "fixture.jsonl"

ODD_DIMS = llama3.Llama3Dims(
    dim=36,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    hidden_dim=50,
    vocab_size=517,
    document_mask=True,
)
"""No size is a multiple of 4, so that every sharding is uneven."""


@dataclass
class Outcome:
    """The results of a job, in values that can be compared."""

    rank: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: list[tuple[int, ...]] = field(default_factory=list)
    """Samples of this rank, per step."""
    committed: list[bool] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Full parameters after the last step, on rank 0."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Full tensors of the train state after the last step, on rank 0."""
    resumed_at: int = 0
    finished: bool = False


ODD_QWEN3 = qwen3_like(ODD_DIMS, document_mask=True)
FOUR_KV_HEADS = replace(ODD_DIMS, num_heads=8, num_kv_heads=4, hidden_dim=52)
ODD_EXPERTS = replace(
    ODD_QWEN3, hidden_dim=None, moe=MoEDims(num_experts=5, top_k=2, hidden_dim=22)
)
MANY_EXPERTS_DIMS = MoEDims(
    num_experts=12,
    top_k=2,
    hidden_dim=22,
    shared_hidden_dim=14,
    score="sigmoid",
    bias_update_rate=0.02,
    balance_loss_weight=0.01,
)
MANY_EXPERTS = replace(ODD_EXPERTS, moe=MANY_EXPERTS_DIMS)
"""Enough experts for expert parallelism, most of which get no token in some microbatch, and all
options of the router."""

ODD_DEEPSEEK = deepseek_v3.DeepseekV3Dims(
    dim=36,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    hidden_dim=52,
    moe=replace(
        MANY_EXPERTS_DIMS,
        num_groups=4,
        top_groups=2,
        route_scale=2.5,
        # Divides by 4 ranks of tensor parallelism.
        shared_hidden_dim=16,
    ),
    q_lora_rank=18,
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=11,
    vocab_size=517,
    rope_scaling=YarnScaling(
        factor=4.0, original_max_position=32, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.7
    ),
    mtp_depth=2,
    document_mask=True,
)
"""Queries and keys have 16 numbers, values 11; two more tokens are predicted."""

ODD_GPT_OSS = gpt_oss.GptOssDims(
    dim=36,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=10,
    moe=replace(MANY_EXPERTS_DIMS, score="softmax", shared_hidden_dim=0, swiglu_limit=0.1),
    window=5,
    vocab_size=517,
    rope_scaling=YarnScaling(factor=4.0, original_max_position=32, truncate=False),
    document_mask=True,
)
"""Some gates and values are clamped."""

ODD_AUTO = auto.AutoDims(
    model_type="gemma3_text",
    dim=36,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=10,
    hidden_dim=52,
    vocab_size=517,
    norms="both",
    norm=NormKind(zero_centered=True),
    qk_norm="each_head",
    bias=True,
    window=5,
    windowed_layers=(1, 2),
    windowed_rope=RopeBase(theta=300.0, scaling=LinearScaling(factor=2.0)),
    activation="gelu_tanh",
    attention_soft_cap=2.0,
    logits_soft_cap=6.0,
    embedding_multiplier=1.5,
    residual_multiplier=0.7,
    attention_multiplier=0.4,
    logits_divisor=1.3,
    document_mask=True,
)
"""Multipliers, soft caps, norms before and after, biases of queries, keys and values alone, and
windows with rotations of their own in some layers. All layers have rotary embeddings: without them,
the gradient of a key's bias is 0 up to rounding."""

ODD_PARALLEL = auto.AutoDims(
    model_type="stablelm",
    dim=36,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    fused_heads=True,
    output_bias=True,
    rope_scaling=LongRopeScaling(
        short_factor=(1.0, 1.5),
        long_factor=(1.2, 4.0),
        original_max_position=8,
        max_position=64,
    ),
    head_dim=10,
    hidden_dim=52,
    vocab_size=517,
    parallel="two_norms",
    norm=NormKind(subtracts_mean=True, bias=True),
    out_bias=True,
    rotated_share=0.4,
    rotates_adjacent=True,
    activation="gelu",
    gated=False,
    feed_forward_bias=True,
    document_mask=True,
)
"""Attention beside a plain feed-forward block, biases of all but queries, keys and values, a
rotated part of heads by LongRoPE, and one projection of queries, keys and values. Where a head is
not rotated, the gradient of a key's bias is 0 up to rounding."""

ODD_SPARSE = auto.AutoDims(
    model_type="glm4_moe",
    dim=36,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=10,
    hidden_dim=52,
    moe=replace(MANY_EXPERTS_DIMS, shared_hidden_dim=20, shared_gate=True),
    dense_layers=(0, 2),
    vocab_size=517,
    norms="after",
    qk_norm="all_heads",
    layers_without_rope=(1,),
    document_mask=True,
)
"""Norms behind the blocks, norms of all heads together, and experts in some layers."""

ODD_LLAMA4 = llama4.Llama4Dims(
    dim=36,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=10,
    hidden_dim=50,
    moe=replace(
        MANY_EXPERTS_DIMS,
        top_k=1,
        normalize_weights=False,
        weights_inputs=True,
    ),
    moe_interval=2,
    nope_interval=2,
    first_nope_layer=1,
    chunk=5,
    qk_norm=True,
    temperature=Temperature(weight=0.3, interval=7),
    vocab_size=517,
    document_mask=True,
)

ODD_QWEN3_NEXT = qwen3_next.Qwen3NextDims(
    dim=36,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    moe=replace(MANY_EXPERTS_DIMS, score="softmax", shared_hidden_dim=16, shared_gate=True),
    full_attention_interval=2,
    head_dim=10,
    rotated_share=0.45,
    linear_num_key_heads=4,
    linear_num_value_heads=12,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    chunk_size=5,
    vocab_size=517,
    document_mask=True,
)
"""Gated DeltaNet before and behind attention; chunks do not divide the pieces of a sequence."""


def odd_config(folder: Path, overrides: Mapping[str, Any]) -> Config:
    """Return the config of the odd model, with `section.key` overrides. A global batch has 8
    samples of 24 tokens; documents begin within samples, so ranks have unequal numbers of
    targets."""
    values: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder), "device": "cpu"},
        "model": {"flavor": "odd"},
        "training": {
            "dataset_path": str(FIXTURE),
            # Shared by all tests of the process, so that the tokenizer is trained once.
            "cache_folder": str(folder.parents[1] / "cache"),
            "local_batch_size": 1,
            "global_batch_size": 8,
            "seq_len": 24,
            "steps": 2,
            "dtype": "float64",
        },
        "optimizer": {"lr": 1e-2},
        "lr_scheduler": {"warmup_steps": 2, "total_steps": 12},
        "activation_checkpoint": {"mode": "none"},
        "comm": {"train_timeout_seconds": 120},
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    llama3.FLAVORS["odd"] = ODD_DIMS
    llama3.FLAVORS["four_kv_heads"] = FOUR_KV_HEADS
    llama3.FLAVORS["odd_tied"] = replace(ODD_DIMS, tied_embeddings=True)
    qwen3.FLAVORS["odd"] = ODD_QWEN3
    qwen3.FLAVORS["odd_experts"] = ODD_EXPERTS
    qwen3.FLAVORS["many_experts"] = MANY_EXPERTS
    qwen3.FLAVORS["capped_experts"] = replace(
        ODD_EXPERTS, moe=MoEDims(num_experts=4, top_k=2, hidden_dim=22, capacity_factor=1.0)
    )
    deepseek_v3.FLAVORS["odd"] = ODD_DEEPSEEK
    gpt_oss.FLAVORS["odd"] = ODD_GPT_OSS
    llama4.FLAVORS["odd"] = ODD_LLAMA4
    auto.FLAVORS["odd"] = ODD_AUTO
    auto.FLAVORS["odd_parallel"] = ODD_PARALLEL
    auto.FLAVORS["odd_sparse"] = ODD_SPARSE
    qwen3_next.FLAVORS["odd"] = ODD_QWEN3_NEXT
    # As V2-Lite: no latent of queries, softmax.
    deepseek_v3.FLAVORS["odd_lite"] = replace(
        ODD_DEEPSEEK,
        q_lora_rank=None,
        mtp_depth=0,
        moe=replace(
            MANY_EXPERTS_DIMS, num_groups=3, top_groups=2, normalize_weights=False, score="softmax"
        ),
    )
    return config_from(values, "the test")


def run_job(folder: Path, overrides: Mapping[str, Any], stop_after: int = 0) -> Outcome:
    """Train the odd model in this worker and return the results. With `stop_after`, the last rank
    requests a stop during that step."""
    return run_config(odd_config(folder, overrides), stop_after)


def run_config(config: Config, stop_after: int = 0) -> Outcome:
    """Train `config` in this worker; see `run_job`."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    outcome = Outcome(torch.distributed.get_rank())
    # Graphs of the worker's earlier jobs would count towards dynamo's limit per function, as if one
    # job had recompiled them.
    torch.compiler.reset()
    stop = StopRequest()

    def watch(state: TrainState, report: StepReport) -> None:
        outcome.losses.append(report.loss)
        outcome.grad_norms.append(report.grad_norm)
        outcome.samples.append(report.samples)
        outcome.committed.append(report.committed)
        outcome.targets.append(report.num_target_tokens)
        if stop_after and report.number == stop_after - 1:
            stop.was_signaled = (
                torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            )

    mesh = mesh_for(config)
    check_against(config, mesh.world_size)
    with build(config, mesh, stop) as built:
        outcome.resumed_at = built.job.state.step
        job = replace(built.job, hooks=[*built.job.hooks, watch])
        outcome.finished = train(job)
        outcome.state = whole(job.state.tensors(), on_rank=0)
    outcome.weights = {
        name.removeprefix("model."): tensor
        for name, tensor in outcome.state.items()
        if name.startswith("model.")
    }
    return outcome


def mesh_for(config: Config) -> Mesh:
    """Return the mesh of a config in this worker. Each shape is created once: DTensor caches
    results per mesh, including the names of its process groups, and reuses them for an equal
    mesh."""
    return _mesh(resolve_degrees(config.parallelism, torch.distributed.get_world_size()))


def forget_meshes() -> None:
    """Forget the meshes of this worker, because its process groups end."""
    _mesh.cache_clear()


@cache
def _mesh(degrees: ParallelDims) -> Mesh:
    return Mesh(detect_device("cpu"), degrees)


def whole(
    tensors: Mapping[str, torch.Tensor], on_rank: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the full tensors, assembled from the boxes of all ranks; with a pipeline, also those
    of the other stages. Every rank must call it; `on_rank` gets the tensors, and the others get
    nothing. (`full_tensor` is wrong for uneven strided shards in torch 2.13.)"""
    local = {}
    for name, tensor in tensors.items():
        part = local_tensor(tensor).detach().contiguous()
        # Bytes are pickled faster than tensors.
        content = part.view(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b""
        local[name] = (tuple(tensor.shape), local_box(tensor).slices, part.dtype, content)
    is_here = on_rank in (None, torch.distributed.get_rank())
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    if on_rank is None:
        torch.distributed.all_gather_object(of_ranks, local)
    else:
        torch.distributed.gather_object(local, of_ranks if is_here else None, dst=on_rank)
    full: dict[str, torch.Tensor] = {}
    for boxes in of_ranks if is_here else []:
        for name, (shape, slices, dtype, content) in boxes.items():
            if name not in full:
                full[name] = torch.full(shape, torch.nan, dtype=torch.float64).to(dtype)
            if content:
                part = torch.frombuffer(bytearray(content), dtype=dtype)
                full[name][slices] = part.view(full[name][slices].shape)
    return full


def digest(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a hash of each tensor's bits."""
    return {
        name: hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        if tensor.ndim
        else str(tensor.item())
        for name, tensor in tensors.items()
    }
