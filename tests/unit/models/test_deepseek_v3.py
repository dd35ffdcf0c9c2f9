"""DeepSeek-V3 and V2: compared with Hugging Face's, sizes, cost, routing and rules."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from tests.harness.hugging_face import make_folder, tensors_of
from tests.harness.tolerances import (
    ATTENTION_FLOAT64,
    COUNTED_FLOPS,
    LOGITS_FLOAT32,
    LOGITS_FLOAT64,
    ROPE_FLOAT32,
)
from tests.unit.models.tiny import DEEPSEEK, DEEPSEEK_V2, tiny_samples, tiny_targets
from torchtitan_lite.checkpoint.convert.dcp.keys import RELEASES, KeyMap
from torchtitan_lite.checkpoint.convert.hugging_face.folder import HuggingFaceFolder
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import (
    HuggingFaceSnapshot,
    expand_key,
    match_key,
)
from torchtitan_lite.checkpoint.snapshots import read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import CheckpointError, ConfigError
from torchtitan_lite.models import deepseek_v3, model_spec, read_hugging_face_config
from torchtitan_lite.models.deepseek_v3 import DeepseekV3Dims
from torchtitan_lite.nn.attention import SDPAKernel
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.initialize import initialize, on_meta
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.moe import MoEDims, Router
from torchtitan_lite.nn.rope import Rope, YarnScaling
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch

BOTH = pytest.mark.parametrize("dims", [DEEPSEEK, DEEPSEEK_V2], ids=["v3", "v2"])


@BOTH
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, LOGITS_FLOAT32), (torch.float64, LOGITS_FLOAT64)]
)
def test_logits_and_gradients_equal_those_of_transformers(
    dims: DeepseekV3Dims, dtype: torch.dtype, tolerance: float
) -> None:
    model, theirs = _drawn(dims, dtype), _theirs(dims).to(dtype)
    named = _named_as_theirs(model, dims)
    missing, unexpected = theirs.load_state_dict(named, strict=False)
    assert missing == unexpected == []
    samples = tiny_samples(length=41)
    ours_BSV, theirs_BSV = model(**samples), theirs(samples["tokens_BS"]).logits
    assert ours_BSV.std() > 0.1
    torch.testing.assert_close(ours_BSV, theirs_BSV, atol=tolerance, rtol=0)
    probe_BSV = torch.randn(ours_BSV.shape, generator=torch.Generator().manual_seed(7))
    for logits_BSV in (ours_BSV, theirs_BSV):
        (logits_BSV * probe_BSV.to(dtype)).mean().backward()
    ours_grad = model.tok_embeddings.weight.grad
    theirs_grad = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours_grad, theirs_grad, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("flavor", "billions", "active_billions"),
    # Of the model cards; active parameters here include both embeddings.
    [("16B", 15.7, 2.7), ("236B", 235.7, 21.4), ("671B", 671.0, 37.6), ("kimi_k2", 1026.4, 32.9)],
)
def test_flavors_have_the_released_sizes(
    flavor: str, billions: float, active_billions: float
) -> None:
    cost = model_spec(ModelConfig(name="deepseek_v3", flavor=flavor)).cost(4096)
    assert round(cost.num_params / 1e9, 1) == billions
    assert round(cost.num_active_params / 1e9, 1) == active_billions


@pytest.mark.parametrize("flavor", sorted(deepseek_v3.FLAVORS))
def test_the_cost_counts_every_parameter(flavor: str) -> None:
    spec = model_spec(ModelConfig(name="deepseek_v3", flavor=flavor))
    model = on_meta(spec.build, torch.float32)
    assert spec.cost(4096).num_params == sum(p.numel() for p in model.parameters())


@BOTH
def test_flops_per_token_equal_torchs_count(dims: DeepseekV3Dims) -> None:
    # Without experts, whose products torch counts in another way.
    dims = replace(dims, num_dense_layers=dims.num_layers)
    batch_size, length = 2, 24
    model = _drawn(dims)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(
            **tiny_samples(batch_size, length),
            targets_BS=tiny_targets(batch_size, length),
            loss=cross_entropy(),
        )
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    num_tokens = batch_size * length
    # On a CPU values are padded to the width of queries; a causal mask needs half of all pairs.
    of_all_pairs = counted[torch.ops.aten.bmm]
    head_dim, padding = dims.attention.head_dim, dims.attention.head_dim - dims.v_head_dim
    pairs = num_tokens * length * dims.num_heads * dims.num_layers
    assert of_all_pairs == 6 * pairs * (2 * head_dim)
    expected = sum(counted.values()) - of_all_pairs + 3 * pairs * (2 * head_dim - padding)
    cost = deepseek_v3.spec_of(dims, "tiny").cost(length)
    assert cost.flops_per_token * num_tokens == pytest.approx(expected, rel=COUNTED_FLOPS)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("mscale", [None, 1.0])
def test_yarn_equals_that_of_transformers(truncate: bool, mscale: float | None) -> None:
    scaling = YarnScaling(
        factor=8.0,
        original_max_position=64,
        beta_fast=6.0,
        mscale=mscale,
        mscale_all_dim=0.7,
        truncate=truncate,
    )
    config = DeepseekV3Config(
        qk_rope_head_dim=16,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 6.0,
            "mscale_all_dim": 0.7,
            "truncate": truncate,
            **({} if mscale is None else {"mscale": mscale}),
        },
    )
    positions_BS = torch.arange(8)[None]
    theirs = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions_BS)
    ours = Rope(head_dim=16, theta=1000.0, scaling=scaling).build()(positions_BS)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own[:, :, 0], other[..., :8], atol=ROPE_FLOAT32, rtol=0)
    assert (scaling.magnitude != 1.0) and (scaling.score_magnitude > 1.0)


def test_values_narrower_than_keys_are_attended_to_as_they_are() -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 9, width, generator=draws, dtype=torch.float64) for width in (10, 10, 7)
    )
    scores = (q @ k.mT * 0.3).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    actual = SDPAKernel(0.3)(q, k, v, None)
    torch.testing.assert_close(actual, scores.softmax(-1) @ v, atol=ATTENTION_FLOAT64, rtol=0)


@pytest.mark.parametrize(
    ("group_score", "chosen"),
    # Experts 0 to 5 in groups of two. The best expert of all lies in the first group, and the best
    # sums of two lie in the others.
    [("top2", [2, 4]), ("max", [0, 2])],
)
def test_a_token_chooses_from_its_best_groups(group_score: Any, chosen: list[int]) -> None:
    dims = MoEDims(
        num_experts=6,
        top_k=2,
        hidden_dim=4,
        num_groups=3,
        top_groups=2,
        group_score=group_score,
    )
    router = Router(6, dims)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(6))
    scores = torch.tensor([[[0.9, 0.01, 0.8, 0.7, 0.75, 0.74]]])
    routing = router(scores.log())
    assert sorted(routing.experts_BSC.flatten().tolist()) == chosen


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, LOGITS_FLOAT32), (torch.float64, LOGITS_FLOAT64)]
)
def test_further_predictions_train_like_the_modules_of_transformers(
    dtype: torch.dtype, tolerance: float
) -> None:
    """The gradient is that of the main loss and the weighted mean of the others."""
    depth, weight, length = 2, 0.6, 19
    dims = replace(DEEPSEEK, mtp_depth=depth, mtp_loss_weight=weight)
    model = _drawn(dims, dtype)
    tokens_BS, targets_BS = tiny_samples(3, length)["tokens_BS"], tiny_targets(3, length)
    batch = Microbatch(
        tokens_BS=tokens_BS,
        targets_BS=targets_BS,
        positions_BS=torch.arange(length).expand(3, -1),
        documents_BS=None,
        rng_keys_B=torch.zeros(3, dtype=torch.int64),
        samples=(0, 1, 2),
    ).with_future(depth)
    loss = model(
        tokens_BS,
        positions_BS=batch.positions_BS,
        rng_keys_B=batch.rng_keys_B,
        targets_BS=targets_BS,
        loss=cross_entropy(),
        **batch.future_inputs,
    )
    (loss / targets_BS.numel()).backward()

    theirs, modules = _theirs(replace(dims, mtp_depth=0)), _prediction_modules(dims)
    named = _named_as_theirs(model, dims)
    theirs.load_state_dict({k: v for k, v in named.items() if not _further(k)})
    modules.load_state_dict(
        {_name_in_module(k): v for k, v in named.items() if _further(k)}, strict=False
    )
    theirs, modules = theirs.to(dtype), modules.to(dtype)
    states = theirs.model(tokens_BS).last_hidden_state
    main = _summed(theirs.lm_head(states), targets_BS)
    angles = theirs.model.rotary_emb(states, batch.positions_BS)
    further = []
    for number, module in enumerate(modules, 1):
        ahead_BS = torch.zeros_like(tokens_BS)
        ahead_BS[:, :-number] = tokens_BS[:, number:]
        embedded = theirs.model.embed_tokens(ahead_BS)
        states = module(embedded, states, angles, None, batch.positions_BS, None)
        further.append(_summed(theirs.lm_head(states)[:, :-number], targets_BS[:, number:]))
    torch.testing.assert_close(loss, main, atol=tolerance * targets_BS.numel(), rtol=0)
    objective = main + weight / depth * sum(further)
    (objective / targets_BS.numel()).backward()
    for ours, other in (
        (model.tok_embeddings.weight, theirs.model.embed_tokens.weight),
        (model.get_parameter("layers.3.eh_proj.weight"), modules.get_parameter("0.eh_proj.weight")),
        (
            model.get_parameter("layers.4.head_norm.weight"),
            modules.get_parameter("1.post_norm.weight"),
        ),
        (model.output.weight, theirs.lm_head.weight),
    ):
        assert ours.grad is not None and ours.grad.abs().max() > 1e-4
        torch.testing.assert_close(ours.grad, other.grad, atol=tolerance, rtol=0)


def test_further_targets_end_with_their_document() -> None:
    batch = Microbatch(
        tokens_BS=torch.tensor([[1, 2, 3, 4, 5, 6]]),
        targets_BS=torch.tensor([[2, 3, IGNORE_INDEX, 5, 6, 7]]),
        positions_BS=torch.arange(6)[None],
        documents_BS=torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32),
        rng_keys_B=torch.zeros(1, dtype=torch.int64),
        samples=(0,),
    )
    ahead = batch.with_future(2)
    none = IGNORE_INDEX
    assert ahead.future_targets_BJS is not None and ahead.future_tokens_BJS is not None
    assert ahead.future_targets_BJS.tolist() == [
        [[3, none, none, 6, 7, none], [none, none, none, 7, none, none]]
    ]
    assert ahead.future_tokens_BJS[0, :, :4].tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.with_future(0) is batch


def test_weights_of_further_predictions_are_read_if_they_are_trained(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "deepseek_v3", max_shard_size="1GB")
    values = read_hugging_face_config(folder)
    dims = deepseek_v3.dims_of_hugging_face(values)
    tensors = load_file(folder / "model.safetensors")
    here, last = f"model.layers.{dims.num_layers}", f"model.layers.{dims.num_layers - 1}"
    further = {
        key.replace(last, here): tensor + 0.25
        for key, tensor in tensors.items()
        if key.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        further[f"{here}.{name}.weight"] = torch.rand(dims.dim)
    further[f"{here}.eh_proj.weight"] = torch.rand(dims.dim, 2 * dims.dim)
    further[f"{here}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    further[f"{here}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **further}, folder / "model.safetensors", {"format": "pt"})

    assert main(["convert", "from-hf", str(folder), str(tmp_path / "without")]) == 0
    arguments = ["convert", "from-hf", str(folder), str(tmp_path / "with"), "--mtp-depth", "1"]
    assert main(arguments) == 0
    back = [tmp_path / f"back-{name}" for name in ("without", "with")]
    for name, out in zip(("without", "with"), back, strict=True):
        assert main(["convert", "to-hf", str(tmp_path / name / "step-0"), str(out)]) == 0
    copies = {f"{here}.embed_tokens.weight", f"{here}.shared_head.head.weight"}
    wanted = {key: value for key, value in further.items() if key not in copies}
    for out, expected in zip(back, (tensors, tensors | wanted), strict=True):
        actual = tensors_of(out)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], value) for key, value in expected.items())

    opened = HuggingFaceFolder(*open_parent_storage(str(folder)))
    ignoring = HuggingFaceSnapshot(opened, deepseek_v3.spec_of(dims, "hf"))
    assert not any(f"layers.{dims.num_layers}." in name for name in ignoring.tensors)
    spec = deepseek_v3.spec_of(replace(dims, mtp_depth=1), "hf")
    reading = HuggingFaceSnapshot(opened, spec)
    ours = f"model.layers.{dims.num_layers}"
    for name, their in (
        ("eh_proj.weight", "eh_proj.weight"),
        ("head_norm.weight", "shared_head.norm.weight"),
        ("attention.wkv_b.weight", "self_attn.kv_b_proj.weight"),
        ("feed_forward.router.expert_bias_X", "mlp.gate.e_score_correction_bias"),
    ):
        assert torch.equal(read_tensor(reading, f"{ours}.{name}"), further[f"{here}.{their}"])
    assert spec.hugging_face is not None
    assert spec.hugging_face.config["num_nextn_predict_layers"] == 1
    with pytest.raises(CheckpointError, match=r"layers.3.enorm.weight is missing"):
        HuggingFaceSnapshot(opened, deepseek_v3.spec_of(replace(dims, mtp_depth=2), "hf"))


@BOTH
@pytest.mark.parametrize("release", RELEASES)
def test_every_parameter_has_a_name_in_torchtitan(dims: DeepseekV3Dims, release: Any) -> None:
    spec = deepseek_v3.spec_of(dims, "tiny")
    keys = KeyMap(spec)
    for name in _persistent(spec.build()):
        theirs, pairs = keys.to_torchtitan(f"model.{name}", release)
        back = keys.from_torchtitan(theirs)
        # Rotated numbers are adjacent here, as there.
        assert back is not None and (back.name, pairs) == (f"model.{name}", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 9}, r"width of a head \(9\) must be even"),
        ({"v_head_dim": 30}, r"v_head_dim = 30.* = 17"),
        ({"kv_lora_rank": 0}, r"sizes above 0: kv_lora_rank \(0\)"),
        ({"num_dense_layers": 4}, r"num_dense_layers \(4\) must be between 0 and num_layers \(3\)"),
    ],
)
def test_invalid_dimensions_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DEEPSEEK, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, r"num_groups \(3\) must be positive and divide num_experts \(8\)"),
        ({"top_groups": 5}, r"top_groups \(5\) must be between 1 and num_groups \(4\)"),
        ({"top_groups": 1}, r"top_groups \(1\) groups of 2 experts have fewer than top_k \(3\)"),
        ({"num_groups": 8, "top_groups": 4}, r"num_groups \(8\) leaves one expert per group"),
    ],
)
def test_invalid_groups_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DEEPSEEK.moe, **changes)


def _drawn(dims: DeepseekV3Dims, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a model with initialized weights, in training mode."""
    spec = deepseek_v3.spec_of(dims, "tiny")
    model = spec.build()
    assert isinstance(model, Decoder)
    initialize(model, spec.init, seed=11)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if "norm" in name:
            # Weights of one would hide a norm on the wrong side.
            parameter.data *= torch.linspace(0.5, 1.5, parameter.numel(), dtype=dtype)
    if dims.moe.score == "sigmoid":
        for module in model.modules():
            if isinstance(module, Router):
                module.expert_bias_X.copy_(torch.linspace(-0.1, 0.1, dims.moe.num_experts))
    return model


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


def _theirs(dims: DeepseekV3Dims) -> Any:
    spec = deepseek_v3.spec_of(dims, "tiny")
    assert spec.hugging_face is not None
    values = {k: v for k, v in spec.hugging_face.config.items() if k != "architectures"}
    values |= {"max_position_embeddings": 512, "experts_implementation": "eager"}
    if values["model_type"] == "deepseek_v3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**values)).eval()
    return DeepseekV2ForCausalLM(DeepseekV2Config(**values)).eval()


def _named_as_theirs(model: Decoder, dims: DeepseekV3Dims) -> dict[str, torch.Tensor]:
    hugging_face = deepseek_v3.spec_of(dims, "tiny").hugging_face
    assert hugging_face is not None
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _persistent(model).items():
        rule, numbers = match_key(hugging_face.keys, name)
        for form in rule.forms:
            (key,) = expand_key(form, numbers, tensor.shape)[:1]
            if ".experts" not in key or ".shared" in key:
                found[key] = tensor
    for layer in range(dims.num_dense_layers, dims.num_layers + dims.mtp_depth):
        experts = model.get_submodule(f"layers.{layer}.feed_forward.experts")
        there = f"model.layers.{layer}.mlp.experts"
        found[f"{there}.gate_up_proj"] = torch.cat(
            [experts.get_parameter("w1"), experts.get_parameter("w3")], dim=1
        )
        found[f"{there}.down_proj"] = experts.get_parameter("w2")
    # The other form of the router's key.
    return {key: tensor for key, tensor in found.items() if "block_sparse_moe" not in key}


def _prediction_modules(dims: DeepseekV3Dims) -> nn.ModuleList:
    main = _theirs(replace(dims, mtp_depth=0))
    config, block = main.config, type(main.model.layers[-1])
    norm = type(main.model.norm)
    number = config.num_hidden_layers - 1
    return nn.ModuleList(MtpLayer(config, block, norm, number) for _ in range(dims.mtp_depth))


def _further(key: str) -> bool:
    """Whether a key is of multi-token prediction after three layers."""
    return key.startswith(("model.layers.3.", "model.layers.4."))


def _name_in_module(key: str) -> str:
    number, _, name = key.removeprefix("model.layers.").partition(".")
    name = name.replace("shared_head.norm", "post_norm")
    own = name.startswith(("enorm", "hnorm", "eh_proj", "post_norm"))
    return f"{int(number) - 3}.{name if own else f'mtp_block.{name}'}"


def _summed(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


@pytest.mark.parametrize("q_lora_rank", [None, 14])
def test_each_rule_of_the_shard_plan_has_a_weight(q_lora_rank: int | None) -> None:
    dims = replace(DEEPSEEK, q_lora_rank=q_lora_rank)
    spec = deepseek_v3.spec_of(dims, "tiny")
    with torch.device("meta"):
        names = [name for name, _ in spec.build().named_parameters()]
    for rule in spec.shard_plan:
        assert any(fnmatchcase(name, rule.pattern) for name in names), rule.pattern
