"""The kernels of ring attention on a GPU, as far as they can be tested without one, and how partial
results are merged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.torch_compat import attention_backward, attention_with_lse
from torchtitan_lite.parallel.context import RingKernel, SequenceSharding


@pytest.mark.parametrize("head_tail", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_ring_computes_causal_attention_and_sends_nothing_for_the_last_turn(
    num_ranks: int, head_tail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[int] = []
    start = dist.batch_isend_irecv
    monkeypatch.setattr(
        dist, "batch_isend_irecv", lambda operations: sends.append(1) or start(operations)
    )
    draws = torch.Generator().manual_seed(0)
    length = 12
    # Four heads of queries share two of keys, and values are narrower.
    shapes = (1, 4, length, 8), (1, 2, length, 8), (1, 2, length, 6), (1, 4, length, 6)
    q, k, v, grad = (torch.randn(*one, generator=draws, dtype=torch.float64) for one in shapes)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    q_whole, k_whole, v_whole = whole
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_whole, k_whole, v_whole, is_causal=True, enable_gqa=True
    )
    expected.backward(grad)

    def attend() -> list[torch.Tensor]:
        group = dist.group.WORLD
        assert group is not None
        sharding = SequenceSharding(num_ranks=num_ranks, rank=dist.get_rank(), head_tail=head_tail)
        own = sharding.own(length, torch.device("cpu"))
        parts = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
        out = RingKernel(sharding, group)(*parts, None)
        out.backward(grad[:, :, own])
        exact = [expected.detach(), *(x.grad for x in whole)]
        for part, x in zip([out.detach(), *(x.grad for x in parts)], exact, strict=True):
            assert x is not None
            torch.testing.assert_close(part, x[:, :, own])
        return parts

    run_on_threads(num_ranks, attend)
    # Keys and values in forward and again in backward; their gradients return to their owner.
    assert len(sends) == num_ranks * (2 * (num_ranks - 1) + num_ranks)


class _Calls(TorchDispatchMode):
    """Records the arguments of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] = args
        return func(*args, **(kwargs or {}))


def test_backward_uses_the_kernel_for_dense_sequences() -> None:
    # Without values, torch takes the path of a GPU.
    q, k, v = (torch.empty(2, 4, 64, 16, device="meta", dtype=torch.bfloat16) for _ in range(3))
    with _Calls() as mode:
        out, lse = attention_with_lse(q, k, v, True)
        grads = attention_backward(out, q, k, v, out, lse, True)
    assert [grad.shape for grad in grads] == [q.shape] * 3 and lse.shape == (2, 4, 64)
    args = mode.calls["_scaled_dot_product_flash_attention_backward.default"]
    assert args[6:8] == (None, None), "cumulative lengths select the kernel for packed sequences"


def test_partial_results_in_bfloat16_are_merged_in_float32() -> None:
    # Scores of some 64, whose sum of exponentials bfloat16 would round by a tenth.
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=draws).bfloat16() for _ in range(3))
    q[..., 0] = k[..., 0] = 8
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=1.0
    )

    def attend() -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        sharding = SequenceSharding(num_ranks=2, rank=dist.get_rank(), head_tail=False)
        own = sharding.own(16, torch.device("cpu"))
        return RingKernel(sharding, group, 1.0)(q[:, :, own], k[:, :, own], v[:, :, own], None)

    error = torch.cat(run_on_threads(2, attend), dim=2).double() - exact
    assert error.abs().max() < 0.02
