"""The arithmetic of the GPU benchmark, which needs no GPU."""

from typing import Any

import pytest
import torch

from benchmarks.gpu import BEST_CASE, RATE, merged
from benchmarks.gpu_case import (
    CASES,
    extra_per_save_s,
    fill_weights,
    kernel_times,
    longest_kernels,
    random_samples,
    tiny,
)


def test_kernels_are_sorted_by_kind_and_gaps_count_as_idle() -> None:
    kernels = [
        ("nvjet_tst_128x256_bf16", 0.0, 2.0),
        ("flash_bwd_kernel", 1.0, 3.0),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 4.0, 5.0),
        ("triton_red_fused__log_softmax_2", 5.0, 5.5),
        ("Memcpy HtoD (Pinned -> Device)", 5.5, 6.0),
        ("triton_poi_fused_mul_silu_0", 8.0, 9.0),
    ]
    assert kernel_times(kernels, num_steps=2) == pytest.approx(
        {
            "attention": 1.0,
            "GEMM": 1.0,
            "optimizer": 0.5,
            "loss": 0.25,
            "copies": 0.25,
            "other": 0.5,
            # From 3 to 4 and from 6 to 8.
            "idle": 1.5,
        }
    )
    assert set(kernel_times([], 1).values()) == {0.0}
    assert longest_kernels([*kernels, *kernels], 2, count=2) == {
        "nvjet_tst_128x256_bf16": 2.0,
        "flash_bwd_kernel": 2.0,
    }


def test_a_save_costs_what_its_cycle_takes_beyond_plain_steps() -> None:
    cycle = [1.0, 1.0, 1.0, 1.5]
    assert extra_per_save_s([*cycle, *cycle, 9.0], every=4) == pytest.approx([0.5, 0.5])


def _row(case: str, ours: float, *, metric: str = RATE, met: bool = True) -> dict[str, Any]:
    return {"case": case, "metric": metric, "ours": ours, "peer": 2.0, "met": met}


def test_rows_of_separate_calls_are_joined_with_the_best_case() -> None:
    first = merged([_row("a", 2.0)], [])
    assert (first[-1]["case"], first[-1]["ours"], first[-1]["met"]) == (BEST_CASE, 1.0, False)
    both = merged([_row("b", 2.2), _row("b", 9.0, metric="peak memory")], first)
    assert [row["case"] for row in both] == ["a", "b", "b", BEST_CASE]
    assert (both[-1]["ours"], both[-1]["met"]) == (pytest.approx(1.1), True)
    # A case that is measured again replaces its rows.
    again = merged([_row("b", 2.4, met=False)], both)
    assert [row["case"] for row in again] == ["a", "b", BEST_CASE]
    assert not again[-1]["met"], "trainers that did not do the same work have no best case"
    alone = {"case": "a", "metric": f"{RATE} (torchtitan did not run)", "ours": 1.0, "met": False}
    assert merged([alone], []) == [alone]


def test_both_trainers_get_the_same_weights() -> None:
    ours = {"layers.0.attention.wq.weight": torch.empty(8, 6), "norm.weight": torch.empty(6)}
    theirs = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
    fill_weights(ours)
    fill_weights(theirs, {"wq.weight": 2})
    halves = ours["layers.0.attention.wq.weight"].unflatten(0, (2, 4))
    pairs = theirs["layers.0.attention.wq.weight"].unflatten(0, (2, 4))
    # Row i of the first half and row i of the second become neighbors.
    assert torch.equal(pairs[:, 0::2], halves[:, :2]) and torch.equal(pairs[:, 1::2], halves[:, 2:])
    assert torch.equal(ours["norm.weight"], torch.ones(6))


def test_samples_of_a_case_are_random_and_repeatable() -> None:
    case = tiny(CASES["b"])
    first, second = (
        random_samples(case).load([range(case.batch)], 1)[0].tokens_BS for _ in range(2)
    )
    assert torch.equal(first, second) and first.shape == (4, case.seq_len)
    assert first.unique().numel() > 50
