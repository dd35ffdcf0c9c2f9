"""Kernels of a GPU against plain torch: attention, grouped products, the chunked loss."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness.tolerances import (
    CHUNKED_LOSS_BFLOAT16,
    GPU_ATTENTION_BFLOAT16,
    GPU_BFLOAT16_LOSS,
    GROUPED_BFLOAT16,
)
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.nn.attention import AttentionMask, FlexKernel, SDPAKernel
from torchtitan_lite.nn.grouped_linear import kernel_linear, looped_linear
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import IGNORE_INDEX
from torchtitan_lite.parallel import context
from torchtitan_lite.parallel.context import SequenceSharding, sequence_order

pytestmark = pytest.mark.gpu


def _drawn(*shape: int, device: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def _documents(batch: int, length: int, device: str) -> torch.Tensor:
    """Return sorted document numbers [B, S] with boundaries at odd positions."""
    starts = torch.zeros(batch, length, dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for row in range(batch):
        places = torch.randint(1, length, (6 + row,), generator=generator)
        starts[row, places] = 1
    return starts.cumsum(1).to(torch.int32).to(device)


def _attended(kernel: torch.nn.Module, qkv: list[torch.Tensor], mask: Any) -> list[torch.Tensor]:
    """Return the output and the gradients for q, k and v."""
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    out = kernel(*inputs, mask)
    weights = _drawn(*out.shape, device=out.device.type, seed=9, dtype=out.dtype)
    out.backward(weights)
    grads = [x.grad for x in inputs if x.grad is not None]
    return [out.detach(), *grads]


@pytest.mark.parametrize("with_documents", [True, False], ids=["documents", "causal"])
def test_flex_equals_sdpa(with_documents: bool, cuda: str) -> None:
    batch, length = 2, 1024
    heads = {"q": 8, "k": 2, "v": 2}
    qkv = [
        _drawn(batch, heads[name], length, 64, device=cuda, seed=i, dtype=torch.bfloat16)
        for i, name in enumerate(heads)
    ]
    positions_BS = torch.arange(length, device=cuda).expand(batch, -1)
    documents_BS = _documents(batch, length, cuda) if with_documents else None
    masks = {b: AttentionMask(b)(positions_BS, documents_BS) for b in ("flex", "sdpa")}
    exact = _attended(SDPAKernel(), [x.double() for x in qkv], masks["sdpa"])
    for kernel, backend in ((FlexKernel(), "flex"), (SDPAKernel(), "sdpa")):
        actual = _attended(kernel, qkv, masks[backend])
        assert len(actual) == len(exact) == 4
        for one, expected in zip(actual, exact, strict=True):
            assert _relative(one, expected) < GPU_ATTENTION_BFLOAT16, backend


class _Ring:
    """Two ranks in two threads, which exchange tensors in memory: NCCL rejects two ranks on one
    GPU, and gloo sends no GPU tensors."""

    def __init__(self) -> None:
        self._to: list[queue.Queue[torch.Tensor]] = [queue.Queue(), queue.Queue()]

    def pass_on(self, x: torch.Tensor, rank: Any, *, last: bool) -> tuple[torch.Tensor, list[Any]]:
        """Replace `context._pass_on`; the rank stands for its group."""
        if last:
            return x, []
        self._to[1 - rank].put(x.clone())
        return self._to[rank].get(timeout=60), []


@pytest.mark.parametrize("head_tail", [True, False], ids=["head-tail", "in order"])
def test_ring_kernels_in_two_parts_equal_sdpa(
    head_tail: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float64
    length, heads = (1024, (8, 2, 2)) if is_gpu else (32, (4, 2, 2))
    qkv = [
        _drawn(2, count, length, 64, device=device, seed=i, dtype=dtype)
        for i, count in enumerate(heads)
    ]
    expected = _attended(SDPAKernel(), [x.double() for x in qkv], None)
    grad_out = _drawn(*expected[0].shape, device=device, seed=9, dtype=dtype)
    monkeypatch.setattr(context, "_pass_on", _Ring().pass_on)
    order = sequence_order(length, 2, head_tail).to(device)
    own = order.chunk(2)
    parts: list[list[torch.Tensor]] = [[], []]
    errors: list[BaseException] = []

    ring: Any = context._Ring

    def run(rank: int) -> None:
        sharding = SequenceSharding(num_ranks=2, rank=rank, head_tail=head_tail)
        q, k, v = (x[:, :, own[rank]].contiguous() for x in qkv)
        ctx: Any = SimpleNamespace()
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        try:
            # Not through autograd: its one thread per device cannot run two ranks at a time.
            out = ring.forward(ctx, q, k, v, sharding, rank, None)
            grads = ring.backward(ctx, grad_out[:, :, own[rank]].contiguous())
            parts[rank] = [out, *grads[:3]]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    natural = order.argsort()
    tolerance = GPU_ATTENTION_BFLOAT16 if is_gpu else 1e-10
    for first, second, whole in zip(*parts, expected, strict=True):
        assert _relative(torch.cat([first, second], dim=2)[:, :, natural], whole) < tolerance


@pytest.mark.parametrize("counts", [[100, 0, 301, 7], [0, 0, 0, 408], [1, 2, 3, 402]])
def test_grouped_kernel_equals_the_loop(counts: list[int], cuda: str) -> None:
    x_NI = _drawn(408, 256, device=cuda, seed=0, dtype=torch.bfloat16)
    weight_XOI = _drawn(4, 192, 256, device=cuda, seed=1, dtype=torch.bfloat16) * 0.1
    counts_X = torch.tensor(counts, device=cuda)
    grad_NO = _drawn(408, 192, device=cuda, seed=2, dtype=torch.bfloat16)
    results = []
    for linear in (kernel_linear, looped_linear):
        inputs = [t.detach().clone().requires_grad_() for t in (x_NI, weight_XOI)]
        out = linear(inputs[0], inputs[1], counts_X)
        out.backward(grad_NO)
        results.append([out.detach(), *(one.grad for one in inputs)])
    for actual, expected in zip(*results, strict=True):
        assert actual is not None and expected is not None
        scale = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=GROUPED_BFLOAT16 * scale)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chunked_loss_equals_cross_entropy(compiled: bool, device: str) -> None:
    is_gpu = device == "cuda"
    if compiled and not is_gpu:
        pytest.skip("the unit tests of the loss compile on a CPU")
    tokens, width, vocabulary = (8192, 2048, 128256) if is_gpu else (96, 16, 512)
    dtype = torch.bfloat16
    hidden_TD = _drawn(tokens, width, device=device, seed=0, dtype=dtype)
    weight_VD = _drawn(vocabulary, width, device=device, seed=1, dtype=dtype) * 0.02
    targets_T = torch.randint(
        0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2)
    ).to(device)
    targets_T[::7] = IGNORE_INDEX
    ours = [hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
    loss = cross_entropy(
        logits_per_chunk=detect_device(device).logits_per_chunk,
        compile_backend="inductor" if compiled else None,
    )
    summed = loss(ours[0], ours[1], targets_T)
    summed.backward()
    exact = [hidden_TD.float().requires_grad_(), weight_VD.float().requires_grad_()]
    expected = F.cross_entropy(
        exact[0] @ exact[1].T, targets_T, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    expected.backward()
    assert summed.item() == pytest.approx(expected.item(), rel=GPU_BFLOAT16_LOSS / 10)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert _relative(one.grad, other.grad) < CHUNKED_LOSS_BFLOAT16
