"""The lr_scheduler, parameter groups, implementations, and the gradient norm."""

import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness.optimizers import OPTIMIZERS_BY_IMPLEMENTATION
from tests.harness.threads import run_on_threads
from tests.harness.tolerances import NORM_FLOAT32, OPTIMIZER_FLOAT32, SCHEDULE
from tests.unit.models.tiny import tiny_decoder, tiny_samples, tiny_spec, tiny_targets
from torchtitan_lite.config.tables.lr_scheduler import LRSchedulerConfig
from torchtitan_lite.config.tables.optimizer import OPTIMIZERS, OptimizerConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.registry import REGISTRY, register_optimizer
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.optim import (
    build_lr_scheduler,
    build_optimizer,
    local_gradients,
    square_norm,
)
from torchtitan_lite.optim import optimizer as optimizer_module
from torchtitan_lite.optim.muon import Muon

_SHAPES = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - p**0.5,
    "cosine": lambda p: 0.5 + 0.5 * math.cos(math.pi * p),
}


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("min_factor", [0.0, 0.1])
def test_each_step_has_the_rate_of_its_phase(decay_type: str, min_factor: float) -> None:
    config = LRSchedulerConfig(
        warmup_steps=4,
        decay_ratio=0.25,
        decay_type=decay_type,  # pyright: ignore[reportArgumentType]
        min_lr_factor=min_factor,
    )
    schedule = build_lr_scheduler(config, OptimizerConfig(lr=2.0), steps=40)
    rates = [schedule.lr(committed) for committed in range(40)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:31] == [2.0] * 27
    shape = _SHAPES[decay_type]
    decay = [2.0 * (min_factor + (1 - min_factor) * shape(i / 10)) for i in range(1, 10)]
    assert rates[31:] == pytest.approx(decay, rel=SCHEDULE)


def test_decay_follows_warmup_at_once_without_a_stable_phase() -> None:
    config = LRSchedulerConfig(warmup_steps=2)
    schedule = build_lr_scheduler(config, OptimizerConfig(lr=1.0), steps=6)
    rates = [schedule.lr(committed) for committed in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25], rel=SCHEDULE)


def test_no_step_has_a_rate_of_zero_and_the_rate_stays_after_the_last_step() -> None:
    for warmup, ratio, kind, steps in itertools.product(
        [0, 1, 5, 50], [None, 0.0, 0.3, 1.0], ["linear", "sqrt", "cosine"], [1, 2, 10]
    ):
        config = LRSchedulerConfig(
            warmup_steps=warmup,
            decay_ratio=ratio,
            decay_type=kind,  # pyright: ignore[reportArgumentType]
        )
        schedule = build_lr_scheduler(config, OptimizerConfig(lr=1.0), steps=steps)
        rates = [schedule.lr(committed) for committed in range(steps)]
        assert all(0 < rate <= 1 for rate in rates), (warmup, ratio, kind, steps)
        assert 0 <= schedule.lr(steps + 1000) <= rates[-1]
        if ratio == 0 and warmup < steps:
            # Without a decay, up to the last step and the one after it.
            assert rates[-1] == schedule.lr(steps) == 1


def test_phases_longer_than_the_run_are_shortened_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            short = build_lr_scheduler(LRSchedulerConfig(), OptimizerConfig(), steps=10)
            both, none = (
                build_lr_scheduler(
                    LRSchedulerConfig(warmup_steps=warmup, decay_ratio=ratio),
                    OptimizerConfig(),
                    steps=10,
                )
                for warmup, ratio in ((6, 0.9), (20, 0.5))
            )
    finally:
        logger.removeHandler(caplog.handler)
    assert (short.warmup_steps, short.decay_steps) == (10, 0)
    assert (both.warmup_steps, both.decay_steps) == (6, 4)
    assert (none.warmup_steps, none.decay_steps) == (10, 0)
    # Nobody has set the warmup of the first one.
    assert list(dict.fromkeys(caplog.messages)) == [
        "lr_scheduler: the schedule has 10 steps, 6 of them warmup, so that decay_ratio has 4 "
        "instead of 9 steps.",
        "lr_scheduler: the schedule has 10 steps, 10 of them warmup, so that warmup_steps has 10 "
        "instead of 20 steps and decay_ratio has 0 instead of 5 steps.",
    ]


def test_the_schedule_may_be_longer_than_the_run() -> None:
    config = LRSchedulerConfig(warmup_steps=0, total_steps=100)
    assert build_lr_scheduler(config, OptimizerConfig(lr=1.0), steps=10).lr(50) == 0.5


def test_norms_embeddings_and_biases_are_exempt_from_decay() -> None:
    model = tiny_decoder()
    model.layers["0"].attention.wq.bias = nn.Parameter(torch.zeros(60))  # pyright: ignore
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = _groups(OptimizerConfig(weight_decay=0.3), model)
    exempt = {names[parameter] for parameter in groups[0.0]}
    assert exempt == {
        "tok_embeddings.weight",
        "norm.weight",
        "layers.0.attention.wq.bias",
        *(f"layers.{i}.{norm}.weight" for i in range(3) for norm in ("attention_norm", "ffn_norm")),
    }
    assert {names[parameter] for parameter in groups[0.3]} == set(names.values()) - exempt


def test_all_parameters_decay_if_enabled() -> None:
    model = tiny_decoder()
    config = OptimizerConfig(weight_decay=0.3, decay_norms_biases_embeddings=True)
    assert {decay: len(ps) for decay, ps in _groups(config, model).items()} == {
        0.3: len(list(model.parameters()))
    }


def test_decay_shrinks_weights_by_the_rate_but_not_norms() -> None:
    model = tiny_decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    optimizer = build_optimizer(config, model, tiny_spec().no_decay, detect_device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(config.lr)
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["output.weight"].data, before["output.weight"] * 0.95)
    assert torch.equal(after["norm.weight"], before["norm.weight"])


def test_decay_of_all_parameters_equals_plain_adamw() -> None:
    model, other = tiny_decoder(), tiny_decoder()
    other.load_state_dict(model.state_dict())
    config = OptimizerConfig(lr=1e-2, weight_decay=0.3, decay_norms_biases_embeddings=True)
    optimizer = build_optimizer(config, model, tiny_spec().no_decay, detect_device("cpu"))
    # As torchtitan builds it: one group.
    expected = torch.optim.AdamW(
        other.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, fused=True
    )
    for _ in range(3):
        for each in (model, other):
            each.zero_grad()
            loss = each(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
            (loss / 46).backward()
        optimizer.step(config.lr)
        expected.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_implementations_give_the_same_weights(name: str) -> None:
    results = {}
    for implementation in ("for-loop", "foreach", "fused"):
        model = tiny_decoder(torch.float32)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        config = OptimizerConfig.model_validate(
            {"name": name, "lr": 1e-2, "implementation": implementation}
        )
        optimizer = build_optimizer(config, model, tiny_spec().no_decay, detect_device("cpu"))
        (inner,) = optimizer.inner
        assert inner.defaults["fused"] == (implementation == "fused")
        assert inner.defaults["foreach"] == (implementation == "foreach")
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
            (loss / 46).backward()
            optimizer.step(config.lr)
        results[implementation] = [parameter.detach() for parameter in model.parameters()]
        moved = [(a - b).abs().max() for a, b in zip(start, results[implementation], strict=True)]
        assert max(moved) > 100 * OPTIMIZER_FLOAT32
    for other in ("foreach", "fused"):
        for a, b in zip(results["for-loop"], results[other], strict=True):
            torch.testing.assert_close(a, b, atol=OPTIMIZER_FLOAT32, rtol=OPTIMIZER_FLOAT32)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdamW", torch.optim.AdamW),
        ("Adam", torch.optim.Adam),
        ("SGD", torch.optim.SGD),
        ("Adagrad", torch.optim.Adagrad),
    ],
)
def test_settings_reach_the_optimizer(name: str, kind: type[torch.optim.Optimizer]) -> None:
    config = OptimizerConfig.model_validate(
        {"name": name, "lr": 0.25, "beta1": 0.6, "beta2": 0.7, "eps": 1e-3}
    )
    optimizer = build_optimizer(config, tiny_decoder(), (), detect_device("cpu"))
    (inner,) = optimizer.inner
    assert type(inner) is kind
    assert inner.defaults["lr"] == 0.25
    if name == "SGD":
        assert inner.defaults["momentum"] == 0.6
    elif name != "Adagrad":
        assert inner.defaults["betas"] == (0.6, 0.7)
    if name != "SGD":
        assert inner.defaults["eps"] == 1e-3


def test_the_norm_covers_all_existing_gradients() -> None:
    a, b, frozen = (nn.Parameter(torch.zeros(n)) for n in (2, 1, 3))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    gradients = local_gradients([a, b, frozen])
    assert [holders for _, holders in gradients] == [1, 1]
    squares = square_norm(gradients)
    assert squares.dtype == torch.float64 and squares.shape == ()
    assert squares.item() == pytest.approx(169.0)
    assert square_norm([]).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS_BY_IMPLEMENTATION)
def test_the_update_is_by_scaled_gradients(
    name: str, implementation: str, dtype: torch.dtype
) -> None:
    """The slots are compared too, because an update by the sign of gradients hides their scale."""

    def updated(gradient: torch.Tensor, **factor: float) -> dict[str, torch.Tensor]:
        model = nn.Linear(3, 1, bias=False, dtype=dtype)
        nn.init.ones_(model.weight)
        config = OptimizerConfig(name=name, implementation=implementation, lr=0.5, eps=0.5)  # pyright: ignore[reportArgumentType]
        optimizer = build_optimizer(config, model, (), detect_device("cpu"))
        for _ in range(2):
            model.weight.grad = gradient.clone()
            optimizer.step(0.5, **factor)
        (weight,) = model.parameters()
        return {"weight": weight.detach(), **optimizer.slots(weight)}

    gradient = torch.tensor([[1.0, -2.0, 300.0]], dtype=dtype)
    # An exact quotient, and one that float32 rounds.
    for factor in (0.25, 1 / 3):
        expected = updated(gradient * factor)
        rel = 1e-6 if dtype is torch.float32 else 1e-15
        scaled = updated(gradient, gradient_factor=factor)
        assert len(expected) > 1
        torch.testing.assert_close(scaled, expected, rtol=rel, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_step_can_depend_on_a_value_of_the_device(name: str) -> None:
    def run(take: list[bool], *, by_value: bool) -> dict[str, torch.Tensor]:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        config = OptimizerConfig(name=name, lr=0.5, eps=0.5)  # pyright: ignore[reportArgumentType]
        optimizer = build_optimizer(config, model, (), detect_device("cpu"))
        assert optimizer.can_step_unless(torch.device("cpu"))
        for number, taken in enumerate(take, 1):
            gradient = torch.tensor([[1.0, -2.0, 300.0]]) * number
            model.weight.grad = gradient if taken else gradient * math.nan
            if by_value:
                optimizer.step_unless(torch.tensor(float(not taken)), 0.5, torch.tensor(4.0))
            elif taken:
                optimizer.step(0.5, 0.25)
        (weight,) = model.parameters()
        return {"weight": weight.detach(), **optimizer.slots(weight)}

    for take in ([True, True], [False, True, True], [True, False, False, True]):
        expected = run(take, by_value=False)
        found = run(take, by_value=True)
        assert found.keys() == expected.keys() and len(found) == 4
        for slot, value in expected.items():
            assert torch.equal(found[slot], value), slot


@pytest.mark.parametrize("by_value", [False, True])
def test_the_average_of_weights_follows_committed_steps(by_value: bool) -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    config = OptimizerConfig(lr=0.5, ema_decay=0.75)
    optimizer = build_optimizer(config, model, (), detect_device("cpu"))
    (weight,) = model.parameters()
    expected = weight.detach().clone()
    for skipped in (False, True, False):
        model.weight.grad = torch.tensor([[1.0, -2.0, 300.0]]) * (math.nan if skipped else 1)
        if by_value:
            optimizer.step_unless(torch.tensor(float(skipped)), 0.5, torch.tensor(4.0))
        elif not skipped:
            optimizer.step(0.5, 0.25)
        if not skipped:
            expected = 0.75 * expected + 0.25 * weight.detach()
    average = optimizer.slots(weight)["ema"]
    torch.testing.assert_close(average, expected, rtol=OPTIMIZER_FLOAT32, atol=0)


def test_the_average_of_bfloat16_weights_is_in_float32() -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    config = OptimizerConfig(lr=0.5, ema_decay=0.999)
    optimizer = build_optimizer(config, model, (), detect_device("cpu"))
    (weight,) = model.parameters()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step(0.5)
    average = optimizer.slots(weight)["ema"]
    change = 1 - weight.detach().float()
    assert average.dtype == torch.float32
    torch.testing.assert_close(1 - average, change * 1e-3, rtol=1e-3, atol=0)


def test_an_average_that_is_not_wanted_is_not_loaded() -> None:
    model = nn.Linear(2, 1, bias=False)
    (weight,) = model.parameters()
    for decay, slots in ((0.0, set[str]()), (0.5, {"ema"})):
        optimizer = build_optimizer(
            OptimizerConfig(ema_decay=decay), model, (), detect_device("cpu")
        )
        optimizer.allocate(weight, "ema", (1, 2))
        assert set(optimizer.slots(weight)) == slots


def test_only_fused_adam_in_float32_can_skip_on_the_device() -> None:
    def can(dtype: torch.dtype = torch.float32, **options: Any) -> bool:
        model = nn.Linear(3, 1, dtype=dtype)
        optimizer = build_optimizer(OptimizerConfig(**options), model, (), detect_device("cpu"))
        return optimizer.can_step_unless(torch.device("cpu"))

    assert can() and can(torch.bfloat16)
    assert not can(torch.float64)
    assert not can(implementation="foreach")
    assert not can(name="SGD") and not can(name="Adagrad")


def test_a_gradient_that_several_ranks_hold_counts_once() -> None:
    full, copied = torch.tensor([2.0]), torch.tensor([3.0])
    share = square_norm([(full, 1), (copied, 4)])
    assert share.item() == pytest.approx(4 + 9 / 4)


def test_ranks_that_hold_the_same_shard_are_counted() -> None:
    def holders() -> list[tuple[list[float], int]]:
        mesh = init_device_mesh("cpu", (2,))
        parameters = [
            nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [placement]))
            for placement in (Replicate(), Shard(0))
        ]
        for one in parameters:
            one.grad = torch.ones_like(one)
        return [(part.tolist(), count) for part, count in local_gradients(parameters)]

    assert run_on_threads(2, holders) == [[([1.0, 1.0], 2), ([1.0], 1)]] * 2


def test_a_non_finite_gradient_shows_in_the_norm() -> None:
    for bad in (float("nan"), float("inf")):
        assert not square_norm([(torch.tensor([1.0, bad]), 1)]).isfinite()


def _groups(config: OptimizerConfig, model: nn.Module) -> dict[float, list[nn.Parameter]]:
    optimizer = build_optimizer(config, model, tiny_spec().no_decay, detect_device("cpu"))
    (inner,) = optimizer.inner
    return {group["weight_decay"]: group["params"] for group in inner.param_groups}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 5000, 2**19 + 3, 2**23])
def test_the_norm_is_exact_and_does_not_depend_on_the_sharding(
    elements: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(elements, generator=generator) * 1e-3).to(dtype)
    exact = values.double().square().sum().item()
    for shards in (1, 2, 8):
        parts = [(part, 1) for part in values.chunk(shards)]
        # The norm is the square root, so its relative error is half of this one.
        assert square_norm(parts).item() == pytest.approx(exact, rel=2 * NORM_FLOAT32)
    columns = values[: elements // 2 * 2].reshape(-1, 2)[:, 0]
    exact = columns.double().square().sum().item()
    assert square_norm([(columns, 1)]).item() == pytest.approx(exact, rel=2 * NORM_FLOAT32)


def test_a_single_parameter_in_float64_keeps_the_factor_out_of_the_kernels() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, dtype=torch.float64))
    optimizer = build_optimizer(OptimizerConfig(), model, (), detect_device("cpu"))
    assert not optimizer.can_step_unless(torch.device("cpu"))


@pytest.mark.parametrize("slot", ["ema", "step"])
def test_averages_and_counts_are_loaded_in_float32(slot: str) -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    (weight,) = model.parameters()
    optimizer = build_optimizer(OptimizerConfig(ema_decay=0.5), model, (), detect_device("cpu"))
    optimizer.allocate(weight, slot, () if slot == "step" else (1, 2))
    assert optimizer.slots(weight)[slot].dtype == torch.float32


def test_a_rank_without_gradients_has_the_norm_zero_in_float64() -> None:
    norm = square_norm([])
    assert norm.item() == 0 and norm.dtype == torch.float64


class _SignSGD(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": config.lr})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
                parameter.sub_(state["average"].sign(), alpha=group["lr"])


class _KeepsAnInteger(_SignSGD):
    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["num_steps"] = 1


class _KeepsARow(_SignSGD):
    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = parameter[:1].clone()


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    yield REGISTRY.optimizers
    REGISTRY.optimizers.clear()


def _one_step(name: str, factor: float = 1.0) -> tuple[nn.Linear, Any]:
    linear = nn.Linear(3, 2, bias=False)
    nn.init.ones_(linear.weight)
    config = OptimizerConfig(name=name, lr=0.5)
    optimizer = build_optimizer(config, linear, (), detect_device("cpu"))
    linear.weight.grad = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    optimizer.step(0.25, factor)
    return linear, optimizer


def test_each_built_in_name_has_its_own_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(name: str) -> list[type]:
        config = OptimizerConfig(name=name, lr=0.5)
        model = nn.Linear(3, 2)
        return [type(o) for o in build_optimizer(config, model, (), detect_device("cpu")).inner]

    assert {name: kinds(name) for name in OPTIMIZERS} == {
        "AdamW": [torch.optim.AdamW],
        "Adam": [torch.optim.Adam],
        "SGD": [torch.optim.SGD],
        "Adagrad": [torch.optim.Adagrad],
        "Muon": [Muon, torch.optim.AdamW],
    }
    monkeypatch.setattr(optimizer_module, "OPTIMIZERS", (*OPTIMIZERS, "Lion"))
    with pytest.raises(AssertionError, match="'Lion' has no entry in _ELEMENT_WISE"):
        kinds("Lion")


def test_a_registered_optimizer_updates_shards_and_its_state_is_saved(registered) -> None:
    register_optimizer("SignSGD", _SignSGD)
    linear, optimizer = _one_step("SignSGD", factor=2.0)
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    assert torch.equal(linear.weight, 1 - 0.25 * signs)
    slots = optimizer.slots(linear.weight)
    assert torch.equal(slots["average"], torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]]))
    assert not optimizer.can_step_unless(torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (
            _KeepsAnInteger,
            r"_KeepsAnInteger keeps 'num_steps' \(int\) for a parameter of .*\[2, 3\]",
        ),
        (_KeepsARow, r"_KeepsARow keeps 'row' \(torch.float32 \[1, 3\]\)"),
    ],
)
def test_state_that_no_checkpoint_could_hold_is_an_error(
    make: Any, kept: str, registered: dict[str, Any]
) -> None:
    register_optimizer("mine", make)
    with pytest.raises(ConfigError, match=kept):
        _one_step("mine")


def _reads_as_a_whole(groups: list[dict[str, Any]], config: OptimizerConfig) -> _SignSGD:
    config.model_dump()
    return _SignSGD(groups, config)


class _KeepsTheTable(_SignSGD):
    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, config)
        self.config = config


@pytest.mark.parametrize(
    ("make", "given", "logged"),
    [
        (_SignSGD, {}, []),
        (_SignSGD, {"weight_decay": 0.0, "ema_decay": 0.5}, []),
        (
            _SignSGD,
            {"implementation": "for-loop"},
            ["optimizer.implementation has no effect: the optimizer mine does not read it."],
        ),
        (
            _SignSGD,
            {"beta1": 0.9, "implementation": "fused"},
            [
                "optimizer.beta1 and optimizer.implementation have no effect: the optimizer mine "
                "does not read them."
            ],
        ),
        (_reads_as_a_whole, {"implementation": "for-loop"}, []),
        (_KeepsTheTable, {"implementation": "for-loop"}, []),
    ],
)
def test_keys_that_a_registered_optimizer_does_not_read_are_logged(
    make: Any,
    given: dict[str, Any],
    logged: list[str],
    registered: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    register_optimizer("mine", make)
    config = OptimizerConfig.model_validate({"name": "mine", "lr": 0.5, **given})
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):
            build_optimizer(config, nn.Linear(3, 2), (), detect_device("cpu"))
    finally:
        logger.removeHandler(caplog.handler)
    assert list(dict.fromkeys(caplog.messages)) == logged


def test_a_registered_optimizer_gets_the_table(registered: dict[str, Any]) -> None:
    tables: list[OptimizerConfig] = []

    def make(groups: list[dict[str, Any]], config: OptimizerConfig) -> _SignSGD:
        tables.append(config)
        return _SignSGD(groups, config)

    register_optimizer("mine", make)
    given = OptimizerConfig(name="mine", lr=0.5, beta1=0.3)
    build_optimizer(given, nn.Linear(3, 2), (), detect_device("cpu"))
    (table,) = tables
    assert isinstance(table, OptimizerConfig)
    assert table.model_dump() == given.model_dump()
    assert table.model_fields_set == given.model_fields_set
    assert not hasattr(table, "beta3")


def test_names_of_optimizers_are_checked(registered: dict[str, Any]) -> None:
    register_optimizer("SignSGD", _SignSGD)
    with pytest.raises(ConfigError, match="not one of AdamW, .*Muon, SignSGD. Did you mean"):
        _one_step("signsg")
    with pytest.raises(ConfigError, match="is registered twice"):
        register_optimizer("SignSGD", _KeepsARow)
    register_optimizer("Adam", _SignSGD)
    with pytest.raises(ConfigError, match="built in. Register another"):
        _one_step("Adam")
