"""Differentiable collectives, compared with the same operation in one process."""

import torch
import torch.distributed as dist

from tests.harness.threads import run_on_threads
from torchtitan_lite.nn.dispatch import take_rows
from torchtitan_lite.parallel.autograd_collectives import exchange_rows, shard_rows, unshard_rows


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exchange_rows_and_gradients() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    # Rank r sends (r + i) % 3 rows to rank i, which may be none.
    counts = [[(r + i) % 3 for i in range(size)] for r in range(size)]
    x_ND = drawn(sum(counts[rank]), 5, seed=rank).requires_grad_()
    received = [counts[r][rank] for r in range(size)]
    out_ND = exchange_rows(x_ND, counts[rank], received, group)
    expected = []
    for r in range(size):
        first = sum(counts[r][:rank])
        expected.append(drawn(sum(counts[r]), 5, seed=r)[first : first + counts[r][rank]])
    assert torch.equal(out_ND, torch.cat(expected))
    # Each row is returned doubled, so its gradient is two.
    back_ND = exchange_rows(2 * out_ND, received, counts[rank], group)
    assert torch.equal(back_ND, 2 * x_ND)
    back_ND.sum().backward()
    assert x_ND.grad is not None
    assert torch.equal(x_ND.grad, torch.full_like(x_ND, 2.0))


def parts_of_a_replicated_tensor() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    total = 5
    whole_ND = drawn(total, 3, seed=0).requires_grad_()
    start, stop = rank * total // size, (rank + 1) * total // size
    part_ND = shard_rows(whole_ND, start, stop, group)
    assert torch.equal(part_ND, whole_ND[start:stop])
    scale = torch.arange(1.0, total + 1, dtype=torch.float64)[:, None]
    together_ND = unshard_rows(part_ND * scale[start:stop], start, total, group)
    assert torch.equal(together_ND, whole_ND * scale)
    weights_ND = drawn(total, 3, seed=1)
    (together_ND * weights_ND).sum().backward()
    assert whole_ND.grad is not None
    assert torch.equal(whole_ND.grad, weights_ND * scale)


def test_uneven_rows_and_their_gradients_are_exchanged() -> None:
    run_on_threads(4, exchange_rows_and_gradients)


def test_gathered_parts_equal_the_full_tensor_in_both_directions() -> None:
    run_on_threads(4, parts_of_a_replicated_tensor)


def test_taken_rows_have_the_gradient_of_indexing() -> None:
    x_RD = drawn(3, 4, seed=2).requires_grad_()
    index_N = torch.tensor([2, 0, 1, 2, 1, 0])
    inverse_RC = torch.tensor([[1, 5], [2, 4], [0, 3]])
    weights_ND = drawn(6, 4, seed=3)
    taken_ND = take_rows(x_RD, index_N, inverse_RC)
    assert torch.equal(taken_ND, x_RD[index_N])
    (expected,) = torch.autograd.grad((x_RD[index_N] * weights_ND).sum(), x_RD)
    (grad,) = torch.autograd.grad((taken_ND * weights_ND).sum(), x_RD)
    torch.testing.assert_close(grad, expected)
