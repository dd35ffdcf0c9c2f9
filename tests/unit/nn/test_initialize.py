"""Initial weights that do not depend on the sharding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.torch_version import TorchVersion

from tests.harness.tolerances import GOLDEN_DIGEST
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.rng import generator
from torchtitan_lite.distributed.redistribute import Box
from torchtitan_lite.models import model_spec
from torchtitan_lite.nn import initialize as module
from torchtitan_lite.nn.initialize import draw_box, initialize
from torchtitan_lite.nn.spec import InitRule

_RULE = InitRule(pattern="*", kind="normal", std=0.5, cutoff_stds=2.0)


@settings(max_examples=150)
@given(st.data())
def test_any_box_equals_that_part_of_the_full_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    offset = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(
        data.draw(st.integers(1, length - start))
        for start, length in zip(offset, shape, strict=True)
    )
    elements_per_block = data.draw(st.sampled_from([1, 5, 24, 1 << 18]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ELEMENTS_PER_BLOCK", elements_per_block)
        full = draw_box("w", shape, Box((0,) * len(shape), tuple(shape)), _RULE, 3)
        part = draw_box("w", shape, Box(offset, size), _RULE, 3)
    assert full.shape == torch.Size(shape)
    assert torch.equal(part, full[Box(offset, size).slices])


def test_a_box_across_real_row_blocks_equals_that_part_of_the_full_tensor() -> None:
    shape = (1030, 300)  # 873 rows per block.
    full = draw_box("w", shape, Box((0, 0), shape), _RULE, 0)
    for first, num_rows in [(0, 873), (870, 10), (873, 157), (1029, 1)]:
        part = draw_box("w", shape, Box((first, 100), (num_rows, 50)), _RULE, 0)
        assert torch.equal(part, full[first : first + num_rows, 100:150])


def test_draws_have_the_deviation_and_the_cutoff_of_their_rule() -> None:
    drawn = draw_box("w", (1000, 300), Box((0, 0), (1000, 300)), _RULE, 0).double()
    # Variance of a standard normal truncated at 2: 1 - 2 * 2 * pdf(2) / (2 * cdf(2) - 1).
    pdf = math.exp(-2) / math.sqrt(2 * math.pi)
    expected = 0.5 * math.sqrt(1 - 4 * pdf / math.erf(math.sqrt(2)))
    assert abs(drawn.std().item() / expected - 1) < 0.01
    assert abs(drawn.mean().item()) < 0.005
    assert 0.99 < drawn.abs().max().item() <= 1.0


def test_a_log_uniform_draw_is_uniform_within_its_bounds() -> None:
    rule = InitRule(pattern="*", kind="log_uniform", low=0.01, high=16.0)
    values = draw_box("w", (9000,), Box((0,), (9000,)), rule, 0).exp()
    assert values.min() >= 0.0099 and values.max() <= 16.001
    quarters = values.quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quarters, torch.tensor([4.0, 8.0, 12.0]), rtol=0, atol=0.3)
    part = draw_box("w", (9000,), Box((8000,), (500,)), rule, 0).exp()
    assert torch.equal(part, values[8000:8500])


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12", reason="trunc_normal_ of torch 2.11 draws others"
)
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (873, 300)])
@pytest.mark.parametrize("cutoff_stds", [0.5, 1.0, 3.0])
def test_draws_are_those_of_trunc_normal(shape: tuple[int, int], cutoff_stds: float) -> None:
    rule = InitRule(pattern="*", kind="normal", std=0.02, cutoff_stds=cutoff_stds)
    drawn = draw_box("w", shape, Box((0, 0), shape), rule, 7)
    cutoff = 0.02 * cutoff_stds
    keyed = generator(7, "init", "w", 0)
    expected = nn.init.trunc_normal_(
        torch.empty(shape), std=0.02, a=-cutoff, b=cutoff, generator=keyed
    )
    assert torch.equal(drawn, expected)


def test_seed_name_and_row_block_change_the_draws() -> None:
    box = Box((0, 0), (2000, 200))
    drawn = draw_box("w", box.size, box, _RULE, 0)
    for other in (
        draw_box("w", box.size, box, _RULE, 1),
        draw_box("v", box.size, box, _RULE, 0),
        drawn.roll(1310, 0),  # Rows per block.
    ):
        assert (other == drawn).float().mean() < 1e-3


def test_the_first_matching_rule_initializes_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    rules = [
        InitRule(pattern="*.bias", kind="zeros"),
        InitRule(pattern="1.*", kind="ones"),
        InitRule(pattern="*", kind="normal", std=0.1),
    ]
    initialize(model, rules, seed=0)
    values = dict(model.named_parameters())
    assert not values["0.bias"].any() and not values["1.bias"].any()
    assert (values["1.weight"] == 1).all()
    assert values["0.weight"].abs().max() <= 0.3 and values["0.weight"].std() > 0.01


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for num_threads in (1, 5):
        monkeypatch.setattr(module, "_num_threads", lambda num_threads=num_threads: num_threads)
        models.append(nn.Sequential(nn.Linear(300, 2100, bias=False), nn.Linear(7, 3, bias=False)))
        initialize(models[-1], [_RULE], seed=0)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        models[0][0].weight, draw_box("0.weight", (2100, 300), Box((0, 0), (2100, 300)), _RULE, 0)
    )


def test_a_parameter_without_a_rule_is_named() -> None:
    rules = [InitRule(pattern="weight", kind="ones")]
    with pytest.raises(LookupError, match="No InitRule matches parameter bias"):
        initialize(nn.Linear(2, 2), rules, seed=0)


def test_all_dtypes_have_the_same_draws_rounded() -> None:
    narrow = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    wide = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    for linear in (narrow, wide):
        initialize(linear, [_RULE], seed=0)
    assert torch.equal(wide.weight.bfloat16(), narrow.weight)
    assert torch.equal(wide.weight.float().double(), wide.weight)


def test_the_initial_weights_of_a_seed_never_change() -> None:
    spec = model_spec(ModelConfig(flavor="tiny"))
    model = spec.build()
    initialize(model, spec.init, seed=42)
    # A sum with a fixed ramp: it changes with every weight, but not with the last bit, which
    # another processor's vector unit may round differently.
    digest = sum(
        (p.detach().double().flatten() * torch.arange(p.numel()).double().cos()).sum().item()
        for p in model.parameters()
    )
    assert digest == pytest.approx(-14.295339696883154, rel=GOLDEN_DIGEST)


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 8), (4, 2), (16, 1)])
def test_the_ranks_of_a_node_share_its_cores(
    num_ranks: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert module._num_threads() == num_threads
