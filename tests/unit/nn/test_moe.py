"""The MoE block compared with a loop over single tokens; its counting and balancing."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.tolerances import GROUPED_BFLOAT16, MOE_FLOAT64
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import flops_of
from torchtitan_lite.nn.grouped_linear import (
    _is_aligned,
    grouped_linear,
    kernel_linear,
    looped_linear,
)
from torchtitan_lite.nn.moe import MoE, MoEDims, SwiGLUExperts, balance_loss

DIM = 6
DIMS = MoEDims(num_experts=5, top_k=2, hidden_dim=7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_hidden_dim": 4, "route_scale": 2.5},
        {"normalize_weights": False},
        # More experts than copies of tokens: most stay empty.
        {"num_experts": 50},
        {"capacity_factor": 0.6},
    ],
    ids=["plain", "shared", "not normalized", "empty experts", "capacity"],
)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(
    score: str, top_k: int, changes: dict
) -> None:
    moe = _moe(score=score, top_k=top_k, **changes)
    moe.router.expert_bias_X.copy_(torch.linspace(-0.2, 0.3, moe.router.dims.num_experts))
    x_BSD, weights_BSD = _tokens(2, 7), _tokens(2, 7, seed=1)
    inputs = [x_BSD, *moe.parameters()]
    ours = moe(x_BSD)
    theirs = _by_tokens(moe, x_BSD)
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)
    for a, b in zip(
        torch.autograd.grad((ours * weights_BSD).sum(), inputs),
        torch.autograd.grad((theirs * weights_BSD).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)


def test_no_token_is_dropped_if_all_choose_the_same_expert() -> None:
    moe = _moe(top_k=1)
    moe.router.expert_bias_X[3] = 10.0
    x_BSD = _tokens(2, 7)
    out_BSD = moe(x_BSD)
    assert (out_BSD.abs().amax(-1) > 0).all()
    out_BSD.sum().backward()
    assert moe.router.load_X.tolist() == [0, 0, 0, 14, 0]


def test_capacity_drops_the_latest_tokens_of_a_full_expert() -> None:
    for weights_inputs in (False, True):
        moe = _moe(top_k=1, capacity_factor=1.0, weights_inputs=weights_inputs)
        moe.router.expert_bias_X[3] = 10.0
        out_TD = moe(_tokens(2, 7)).flatten(0, 1)
        capacity = math.ceil(7 / 5)
        for out_SD in out_TD.split(7):
            assert (out_SD[:capacity] != 0).all()
            assert (out_SD[capacity:] == 0).all()
        assert torch.equal(out_TD, moe(_tokens(2, 7)).flatten(0, 1))


def test_products_of_experts_count_their_flops() -> None:
    products = torch.ops.torchtitan_lite
    x_NI, weight_XOI, counts_X = torch.zeros(6, 3), torch.zeros(2, 5, 3), torch.tensor([2, 4])
    flops = flops_of(products.grouped_linear.default, (x_NI, weight_XOI, counts_X), {}, None)
    assert flops == 2 * 6 * 5 * 3
    outer = (torch.zeros(6, 5), x_NI, counts_X)
    assert flops_of(products.grouped_outer.default, outer, {}, None) == 2 * 6 * 5 * 3


def test_routing_of_a_token_does_not_depend_on_its_batch() -> None:
    moe = _moe()
    x_BSD = _tokens(3, 8)
    together = moe.router(x_BSD)
    for sample in range(3):
        alone = moe.router(x_BSD[sample : sample + 1, 2:5])
        assert torch.equal(alone.experts_BSC[0], together.experts_BSC[sample, 2:5])
        torch.testing.assert_close(alone.weights_BSC[0], together.weights_BSC[sample, 2:5])


def test_in_bfloat16_scores_and_weights_are_float32() -> None:
    moe = _moe().to(torch.bfloat16)
    x_BSD = _tokens(2, 7).to(torch.bfloat16)
    assert moe.router(x_BSD).weights_BSC.dtype == torch.float32
    assert moe(x_BSD).dtype == torch.bfloat16


def test_the_bias_changes_the_choice_but_not_the_weights() -> None:
    moe = _moe(normalize_weights=False)
    x_BSD = _tokens(2, 7)
    scores_BSX = moe.router.gate(x_BSD).softmax(-1)
    before = moe.router(x_BSD)
    moe.router.expert_bias_X[4] = 10.0
    after = moe.router(x_BSD)
    assert not (before.experts_BSC == 4).any(-1).all()
    assert (after.experts_BSC == 4).any(-1).all()
    for routing in (before, after):
        expected_BSC = scores_BSX.gather(-1, routing.experts_BSC)
        torch.testing.assert_close(routing.weights_BSC, expected_BSC)


def test_updates_move_the_bias_towards_a_balanced_load() -> None:
    router = _moe(num_experts=4, top_k=1, bias_update_rate=0.25).router
    router.update_expert_bias(torch.tensor([1, 2, 3, 2]))
    assert router.expert_bias_X.tolist() == [0.25, 0.0, -0.25, 0.0]


def test_updates_balance_the_load() -> None:
    router = _moe(num_experts=8, score="sigmoid", bias_update_rate=0.01).router
    x_BSD = (_tokens(8, 64) + 1.0).detach()
    first_X = router(x_BSD).counts_X
    for _ in range(200):
        router.update_expert_bias(router(x_BSD).counts_X)
    last_X = router(x_BSD).counts_X
    fair = 8 * 64 * 2 / 8
    assert first_X.max() > 2 * fair
    assert last_X.max() < 1.2 * fair


def test_the_bias_is_saved_and_the_counts_are_not() -> None:
    saved = _moe().state_dict()
    assert "router.expert_bias_X" in saved
    assert "router.load_X" not in saved
    with torch.device("meta"):
        moe = MoE(DIM, DIMS)
    assert moe.experts.w1.is_meta
    assert not moe.router.expert_bias_X.is_meta


def test_each_training_token_is_counted_once() -> None:
    moe = _moe(shared_hidden_dim=4)
    x_BSD = _tokens(2, 7)
    expected_X = moe.router(x_BSD).counts_X
    assert moe.router.load_X.sum() == 0
    out_BSD = checkpoint(moe, x_BSD, use_reentrant=False)
    assert isinstance(out_BSD, torch.Tensor)
    out_BSD.sum().backward()
    assert torch.equal(moe.router.load_X, expected_X)
    assert expected_X.sum() == 2 * 7 * DIMS.top_k
    moe(x_BSD).sum().backward()
    assert torch.equal(moe.router.load_X, 2 * expected_X)
    moe.eval()
    moe(x_BSD).sum().backward()
    assert torch.equal(moe.router.load_X, 2 * expected_X)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_adds_its_gradient_and_keeps_the_output(score: str) -> None:
    factor = 0.3
    plain, balanced = _moe(score=score), _moe(score=score, balance_loss_weight=factor)
    x_BSD = _tokens(2, 7)
    inputs = [x_BSD, plain.router.gate.weight]
    out_BSD = balanced(x_BSD)
    assert torch.equal(out_BSD, plain(x_BSD))

    logits_BSX = plain.router.gate(x_BSD)
    scores_BSX = logits_BSX.softmax(-1) if score == "softmax" else logits_BSX.sigmoid()
    experts_BSC = plain.router(x_BSD).experts_BSC
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        for expert in range(5):
            # Equations 17 to 20 of arXiv:2412.19437, times the length of the sequence.
            load = 5 / (2 * 7) * (experts_BSC[b] == expert).sum()
            share = sum(scores_BSX[b, s, expert] / scores_BSX[b, s].sum() for s in range(7)) / 7
            loss = loss + 7 * factor * load * share
    expected = torch.autograd.grad(plain(x_BSD).sum() + loss, inputs)
    grads = torch.autograd.grad(out_BSD.sum(), [x_BSD, balanced.router.gate.weight])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)
    without = torch.autograd.grad(plain(x_BSD).sum(), inputs)
    assert (grads[1] - without[1]).abs().max() > 1e-3
    assert torch.equal(torch.autograd.grad(balanced.eval()(x_BSD).sum(), x_BSD)[0], without[0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance_loss_weight", [0.0, 0.3])
def test_the_z_loss_adds_its_gradient_and_keeps_the_output(
    score: str, balance_loss_weight: float
) -> None:
    others = {"score": score, "balance_loss_weight": balance_loss_weight}
    plain, bounded = _moe(**others), _moe(**others, z_loss_weight=0.2)
    x_BSD = _tokens(2, 7)
    out_BSD = bounded(x_BSD)
    assert torch.equal(out_BSD, plain(x_BSD))
    inputs = [x_BSD, plain.router.gate.weight]
    # Equation 5 of arXiv:2202.08906, times the number of tokens.
    loss = 0.2 * (plain.router.gate(x_BSD).exp().sum(-1).log() ** 2).sum()
    expected = torch.autograd.grad(plain(x_BSD).sum() + loss, inputs)
    grads = torch.autograd.grad(out_BSD.sum(), [x_BSD, bounded.router.gate.weight])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)
    without = torch.autograd.grad(plain(x_BSD).sum(), inputs)
    assert (grads[1] - without[1]).abs().max() > 1e-3
    without = torch.autograd.grad(plain.eval()(x_BSD).sum(), x_BSD)
    assert torch.equal(torch.autograd.grad(bounded.eval()(x_BSD).sum(), x_BSD)[0], without[0])


def test_the_balance_loss_of_a_balanced_load_is_the_number_of_tokens() -> None:
    scores_BSX = torch.full((3, 8, 4), 0.25)
    counts_BX = torch.full((3, 4), 4.0)
    assert balance_loss(scores_BSX, counts_BX) == 3 * 8


@pytest.mark.parametrize(
    "counts", [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0]], ids=lambda c: "-".join(map(str, c))
)
def test_grouped_products_accept_strided_and_unaligned_inputs(counts: list[int]) -> None:
    draws = torch.Generator().manual_seed(5)
    # Every other column from an odd offset on; matrices transposed in memory.
    x_NI = torch.randn(10, 15, dtype=torch.float64, generator=draws)[1:, 1::2].requires_grad_()
    weight_XOI = torch.randn(4, 7, 3, dtype=torch.float64, generator=draws).mT.requires_grad_()
    assert x_NI.stride() == (15, 2)
    assert not weight_XOI.is_contiguous()
    counts_X = torch.tensor(counts)
    given_NO = grouped_linear(x_NI, weight_XOI, counts_X)
    experts_N = torch.arange(4).repeat_interleave(counts_X)
    expected_NO = (weight_XOI[experts_N] @ x_NI[:, :, None])[:, :, 0]
    torch.testing.assert_close(given_NO, expected_NO, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)
    grad_NO = torch.randn(3, 9, dtype=torch.float64, generator=draws).t()
    for a, b in zip(
        torch.autograd.grad(given_NO, [x_NI, weight_XOI], grad_NO),
        torch.autograd.grad(expected_NO, [x_NI, weight_XOI], grad_NO),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=MOE_FLOAT64, rtol=MOE_FLOAT64)


def test_without_any_token_the_gradients_are_zero_and_not_missing() -> None:
    moe = _moe()
    tokens_ND = torch.empty(0, DIM, dtype=torch.float64, requires_grad=True)
    out_ND = moe.experts(tokens_ND, torch.zeros(5, dtype=torch.int64))
    assert out_ND.shape == (0, DIM)
    out_ND.sum().backward()
    for parameter in moe.experts.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


def test_counts_that_do_not_match_the_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match="add up to 8, for 9 rows"):
        looped_linear(torch.ones(9, 4), torch.ones(2, 3, 4), torch.tensor([5, 3]))


def test_the_kernel_and_the_loop_agree() -> None:
    _compare_kernel_with_loop(torch.device("cpu"))


def test_the_choice_of_the_kernel_compiles() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def aligned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + _is_aligned(tensor)

    assert aligned(torch.zeros(3, 8)).all() and not aligned(torch.zeros(3, 4)).any()


@pytest.mark.parametrize(
    ("tensor", "is_aligned"),
    [
        (torch.zeros(2, 3, 8), True),
        (torch.zeros(2, 3, 16)[:, :, 8:], True),
        (torch.zeros(2, 3, 16)[:, :, 4:12], False),
        (torch.zeros(2, 8, 3).mT, False),
        # Every second row is aligned, as is each matrix.
        (torch.zeros(2, 2, 4), False),
    ],
)
def test_the_kernel_needs_rows_at_multiples_of_16_bytes(
    tensor: torch.Tensor, is_aligned: bool
) -> None:
    assert _is_aligned(tensor) == is_aligned


@pytest.mark.gpu
def test_the_kernel_and_the_loop_agree_on_a_gpu() -> None:
    _compare_kernel_with_loop(torch.device("cuda"))


# Dynamo instantiates the functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_block_compiles_as_one_graph() -> None:
    moe = _moe(balance_loss_weight=0.1, z_loss_weight=0.1)
    x_BSD = _tokens(2, 7)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(moe(x_BSD).sum(), x_BSD)
    counted_X = moe.router.load_X.clone()
    (grad,) = torch.autograd.grad(compiled(x_BSD).sum(), x_BSD)
    assert torch.equal(grad, expected)
    assert torch.equal(moe.router.load_X, 2 * counted_X)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 6}, r"top_k \(6\) must be between 1 and num_experts \(5\)"),
        ({"top_k": 0}, r"top_k \(0\)"),
        ({"hidden_dim": 0}, r"hidden_dim \(0\) must be positive"),
        ({"z_loss_weight": -0.1}, r"z_loss_weight \(-0.1\) must not be below 0"),
        ({"capacity_factor": 0.0}, r"capacity_factor \(0.0\) must be above 0"),
    ],
)
def test_invalid_dimensions_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DIMS, **changes)


@pytest.mark.parametrize("shared_hidden_dim", [0, 4])
def test_the_dimensions_count_the_parameters(shared_hidden_dim: int) -> None:
    dims = replace(DIMS, shared_hidden_dim=shared_hidden_dim)
    one_expert = 3 * DIM * dims.hidden_dim
    num_params = sum(parameter.numel() for parameter in MoE(DIM, dims).parameters())
    assert dims.num_params(DIM) == num_params
    assert dims.num_active_params(DIM) == num_params - (5 - 2) * one_expert


def _moe(**changes) -> MoE:
    """Return a block in training mode, with the same weights for the same dimensions."""
    draws = torch.Generator().manual_seed(7)
    moe = MoE(DIM, replace(DIMS, **changes)).double()
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draws)
    return moe


def _tokens(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(batch_size, length, DIM, dtype=torch.float64, generator=draws)
    return x_BSD.requires_grad_()


def _by_tokens(moe: MoE, x_BSD: torch.Tensor) -> torch.Tensor:
    """Compute one token after the other, each through its own experts."""
    dims, experts = moe.router.dims, moe.experts
    assert isinstance(experts, SwiGLUExperts)
    length = x_BSD.shape[1]
    share = length * dims.top_k / dims.num_experts
    capacity = math.ceil((dims.capacity_factor or dims.num_experts) * share)
    rows, taken = [], []
    for place, x_D in enumerate(x_BSD.flatten(0, 1)):
        if place % length == 0:
            taken = [0] * dims.num_experts
        logits_X = moe.router.gate.weight @ x_D
        scores_X = logits_X.softmax(0) if dims.score == "softmax" else logits_X.sigmoid()
        biased = (scores_X + moe.router.expert_bias_X).tolist()
        chosen = sorted(range(dims.num_experts), key=lambda expert: -biased[expert])[: dims.top_k]
        total = sum(scores_X[expert] for expert in chosen) if dims.normalize_weights else 1.0
        row_D = torch.zeros_like(x_D) if moe.shared is None else moe.shared(x_D)
        for expert in chosen:
            taken[expert] += 1
            if taken[expert] > capacity:
                continue
            hidden_F = F.silu(experts.w1[expert] @ x_D) * (experts.w3[expert] @ x_D)
            weight = dims.route_scale * scores_X[expert] / total
            row_D = row_D + weight * (experts.w2[expert] @ hidden_F)
        rows.append(row_D)
    return torch.stack(rows).view_as(x_BSD)


def _compare_kernel_with_loop(device: torch.device) -> None:
    draws = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=draws).to(device, torch.bfloat16)
        return values.requires_grad_()

    x_NI, weight_XOI, grad_NO = drawn(21, 16), drawn(4, 24, 16), drawn(21, 24)
    counts_X = torch.tensor([9, 0, 5, 7], device=device)
    by_kernel = kernel_linear(x_NI, weight_XOI, counts_X)
    by_loop = looped_linear(x_NI, weight_XOI, counts_X)
    inputs = [x_NI, weight_XOI]
    for a, b in zip(
        (by_kernel, *torch.autograd.grad(by_kernel, inputs, grad_NO)),
        (by_loop, *torch.autograd.grad(by_loop, inputs, grad_NO)),
        strict=True,
    ):
        assert (a - b).abs().max() <= GROUPED_BFLOAT16 * b.abs().max()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"num_groups": 3}, r"num_groups \(3\) must be positive and divide"),
        ({"num_groups": 2, "top_groups": 3}, r"top_groups \(3\) must be between 1 and"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_groups"),
    ],
)
def test_groups_of_experts_fit_the_experts(groups: dict[str, int], message: str) -> None:
    dims = MoEDims(num_experts=8, top_k=2, hidden_dim=4)
    with pytest.raises(ConfigError, match=message):
        replace(dims, **groups)


@pytest.mark.parametrize(
    "dims",
    [
        # The chosen groups have exactly as many experts as are chosen.
        {"num_experts": 8, "num_groups": 4, "top_groups": 2, "top_k": 4},
        # A single group may have a single expert.
        {"num_experts": 1, "num_groups": 1, "top_k": 1, "group_score": "top2"},
    ],
)
def test_the_least_groups_are_valid(dims: dict) -> None:
    assert replace(DIMS, **dims).num_experts == dims["num_experts"]


def test_loads_are_counted_beyond_two_billion_tokens() -> None:
    router = MoEDims(num_experts=4, top_k=2, hidden_dim=8).build(8).router
    assert router.load_X.dtype == torch.int64
