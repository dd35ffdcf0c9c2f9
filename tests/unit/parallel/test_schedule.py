"""One stage: gradients accumulate over microbatches."""

from dataclasses import replace

import torch

from tests.unit.models.tiny import WHOLE, tiny_decoder, tiny_samples, tiny_targets
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import Microbatch, TokenLoss, VocabularyShard
from torchtitan_lite.parallel import GradientAccumulation

_SAMPLES, _TARGETS = tiny_samples(6), tiny_targets(6)


def test_microbatches_add_up_to_the_whole_batch(mesh: Mesh) -> None:
    full, parts = tiny_decoder(), tiny_decoder()
    loss = cross_entropy()
    expected = GradientAccumulation(full, loss, mesh, WHOLE).run(
        [_microbatch(slice(0, 6))], backward=True
    )
    total = GradientAccumulation(parts, loss, mesh, WHOLE).run(
        [_microbatch(slice(0, 1)), _microbatch(slice(1, 4)), _microbatch(slice(4, 6))],
        backward=True,
    )
    assert total.dtype == torch.float64 and total.shape == () and not total.requires_grad
    torch.testing.assert_close(total, expected)
    for a, b in zip(full.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_without_backward_autograd_records_nothing(mesh: Mesh) -> None:
    model = tiny_decoder()
    schedule = GradientAccumulation(model, cross_entropy(), mesh, WHOLE)
    batches = [_microbatch(slice(0, 2)), _microbatch(slice(2, 6))]
    value = schedule.run(batches, backward=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(value, schedule.run(batches, backward=True))
    assert torch.is_grad_enabled()


def test_a_loss_of_the_microbatch_trains_and_does_not_validate(mesh: Mesh) -> None:
    def weighted(batch: Microbatch) -> TokenLoss:
        weight = batch.target_values["weight"].sum()

        def loss(
            hidden_TD: torch.Tensor,
            weight_VD: torch.Tensor,
            targets_T: torch.Tensor,
            *,
            shard: VocabularyShard | None = None,
        ) -> torch.Tensor:
            return plain(hidden_TD, weight_VD, targets_T, shard=shard) * weight

        return loss

    plain = cross_entropy()
    schedule = GradientAccumulation(tiny_decoder(), plain, mesh, WHOLE, training_loss=weighted)
    batch = _microbatch(slice(0, 2))
    batch = replace(batch, target_values={"weight": torch.full(batch.targets_BS.shape, 0.5)})
    expected = schedule.run([batch], backward=False)
    value = schedule.run([batch], backward=True)
    torch.testing.assert_close(value, expected * 0.5 * batch.targets_BS.numel())


def test_no_microbatch_gives_a_loss_of_zero(mesh: Mesh) -> None:
    schedule = GradientAccumulation(tiny_decoder(), cross_entropy(), mesh, WHOLE)
    assert schedule.run([], backward=True).item() == 0


def _microbatch(part: slice) -> Microbatch:
    return Microbatch(
        tokens_BS=_SAMPLES["tokens_BS"][part],
        targets_BS=_TARGETS[part],
        positions_BS=_SAMPLES["positions_BS"][part],
        documents_BS=None,
        rng_keys_B=_SAMPLES["rng_keys_B"][part],
        samples=tuple(range(6))[part],
    )
