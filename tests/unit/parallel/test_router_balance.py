"""Router load: integer counts over all ranks, and a bias that changes only with committed steps."""

import torch
from torch import nn

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.nn.moe import MoEDims, Router
from torchtitan_lite.parallel.expert import RouterBalance, routers_of

NAMES = ["first", "elsewhere", "last"]


def routers() -> nn.Module:
    dims = MoEDims(num_experts=4, top_k=1, hidden_dim=8, bias_update_rate=0.5)
    return nn.ModuleDict({"first": Router(6, dims), "last": Router(6, dims)})


def test_a_rank_counts_its_own_stages_and_zero_for_the_others(mesh: Mesh) -> None:
    model = routers()
    balance = RouterBalance(model, NAMES, 4, mesh, ParallelismConfig())
    routers_of(model)["first"].load_X += torch.tensor([1, 2, 3, 4])
    # Float32 has no odd integers of this size.
    large = (1 << 24) + 1
    routers_of(model)["last"].load_X += torch.tensor([5, 0, 0, large])
    counted = balance.counts(torch.device("cpu"))
    assert counted.tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 5, 0, 0, large]


def test_a_committed_step_updates_the_biases_and_a_reset_the_counts(mesh: Mesh) -> None:
    model = routers()
    balance = RouterBalance(model, NAMES, 4, mesh, ParallelismConfig())
    totals = torch.tensor([1.0, 2, 3, 2, 9, 9, 9, 9, 8, 0, 0, 0])
    for committed in (False, True):
        for router in routers_of(model).values():
            router.load_X += 7
        loads = balance.apply(totals, committed=committed)
        assert list(loads) == NAMES and loads["elsewhere"].tolist() == [9, 9, 9, 9]
        assert all(router.load_X.any() for router in routers_of(model).values())
        balance.reset()
        assert not any(router.load_X.any() for router in routers_of(model).values())
        moved = [router.expert_bias_X.tolist() for router in routers_of(model).values()]
        expected = [[0.5, 0, -0.5, 0], [-0.5, 0.5, 0.5, 0.5]] if committed else [[0.0] * 4] * 2
        assert moved == expected


def test_tokens_counted_by_several_ranks_are_integers_after_the_sum(mesh: Mesh) -> None:
    model = routers()
    copies = 6
    mesh.degrees = ParallelDims(tp=copies)
    config = ParallelismConfig(enable_sequence_parallel=False)
    balance = RouterBalance(model, ["first", "last"], 4, mesh, config)
    routers_of(model)["first"].load_X += torch.tensor([7, 7, 7, 7])
    share = balance.counts(torch.device("cpu"))
    total = torch.zeros_like(share)
    for _ in range(copies):
        total += share
    assert total[:4].tolist() != [7, 7, 7, 7]
    loads = balance.apply(total, committed=True)
    assert loads["first"].tolist() == [7, 7, 7, 7]
    assert routers_of(model)["first"].expert_bias_X.tolist() == [0, 0, 0, 0]


def test_a_model_without_routers_adds_nothing(mesh: Mesh) -> None:
    balance = RouterBalance(nn.Linear(2, 2), [], 0, mesh, ParallelismConfig())
    counted = balance.counts(torch.device("cpu"))
    assert counted.shape == (0,)
    assert balance.apply(counted, committed=True) == {}
