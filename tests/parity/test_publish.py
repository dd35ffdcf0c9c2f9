"""Published weights arrive bit by bit, on any layout of the subscriber, whatever the trainer's
mesh."""

import logging
import os
import secrets
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.harness.jobs import mesh_for, odd_config, whole
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import EXPERT_MESHES, MESHES
from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.cli import generate
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.redistribute.execution.program import RAW_DTYPES
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.serving.inference import LoadedModel
from torchtitan_lite.serving.publish import Subscriber, Subscription, Target, Update
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import PUBLISHED_FILE, read_json
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

Pools = Callable[[int], WorkerPool]
SECRET = "0123456789abcdef0123456789abcdef"
SERVERS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    # shape of the mesh, placements
    "one": ((1,), (Replicate(),)),
    "rows-2": ((2,), (Shard(0),)),
    "columns-2": ((2,), (Shard(-1),)),
    "columns-3": ((3,), (Shard(-1),)),
    "rows-2-columns-2": ((2, 2), (Shard(0), Shard(-1))),
    "copies-2-rows-2": ((2, 2), (Replicate(), Shard(0))),
}
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}
ROWS = [
    # trainer, server, transport, in `make test`
    ("fsdp-2", "columns-2", "memory", True),
    ("fsdp-2-tp-2", "rows-2-columns-2", "server", False),
    ("tp-2", "rows-2", "memory", False),
    ("fsdp-4", "columns-3", "memory", False),
    ("hsdp-2x2", "one", "server", False),
    ("pp-2-fsdp-2", "rows-2", "memory", False),
    ("pp-2-tp-2", "columns-2", "server", False),
    ("fsdp-2-cp-2", "copies-2-rows-2", "memory", False),
    ("cp-2-allgather", "columns-3", "server", False),
    ("hsdp-2x2-tp-2", "rows-2-columns-2", "memory", False),
    ("pp-2-tp-2-fsdp-2", "columns-2", "memory", False),
]
EXPERT_ROWS = [
    ("ep-2-etp-2", "columns-2", "memory", False),
    ("ep-4", "rows-2", "server", False),
    ("ep-2-fsdp-4", "columns-3", "memory", False),
    ("pp-2-ep-2", "rows-2-columns-2", "memory", False),
    ("hsdp-2x2-ep-2", "one", "server", False),
]


def rows(table: list[tuple[str, str, str, bool]]) -> list[Any]:
    return [
        pytest.param(*row, marks=[] if is_short else [pytest.mark.matrix])
        for *row, is_short in table
    ]


class _Server:
    """One process of a subscriber, which checks what it receives against the weights."""

    def __init__(self, source: str, server: str) -> None:
        shape, placements = SERVERS[server]
        size = torch.Size(shape).numel()
        self._mesh = HolderMesh(shape, tuple(range(size)))
        self._placements = placements
        self._holder = dist.get_rank() % size
        subscriber = Subscriber(source, secret=SECRET, timeout_s=20)
        self._layouts = {
            name: self._layout(len(spec.shape)) for name, spec in subscriber.tensors.items()
        }
        self._tensors = {
            name: torch.empty(
                self._layouts[name].local_shape(spec.shape, self._holder), dtype=spec.dtype
            )
            for name, spec in subscriber.tensors.items()
        }
        targets = [
            Target(name, tensor, self._layouts[name], self._holder)
            for name, tensor in self._tensors.items()
        ]
        self.subscription: Subscription = subscriber.subscribe(targets)

    def _layout(self, num_dims: int) -> Layout:
        return Layout(
            self._mesh, self._placements if num_dims else [Replicate()] * 2
        ).with_num_dims(num_dims)

    def check(self, expected: dict[str, torch.Tensor]) -> None:
        assert self._tensors.keys() == expected.keys()
        for name, whole_tensor in expected.items():
            boxes = self._layouts[name].boxes(whole_tensor.shape, self._holder)
            own = [whole_tensor[box.slices] for box in boxes]
            assert len(own) <= 1, name
            tensor = self._tensors[name]
            part = own[0].to(tensor.dtype) if own else torch.empty_like(tensor)
            raw = RAW_DTYPES[tensor.dtype.itemsize]
            assert torch.equal(tensor.view(raw), part.view(raw)), name


def publish_and_receive(
    folder: Path, overrides: dict[str, Any], server: str, transport: str
) -> list[Update | None]:
    """Train in this worker, and receive each version in it."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    os.environ[TOKEN] = SECRET
    settings = {"training.steps": 3, "publish.enable": True, **overrides}
    if transport == "server":
        settings["publish.address"] = "127.0.0.1"
    config = odd_config(folder, settings)
    check_against(config, mesh_for(config).world_size)
    updates: list[Update | None] = []
    servers: list[_Server] = []

    def connect() -> None:
        source = str(folder)
        if transport == "server":
            source = read_json((folder / PUBLISHED_FILE).read_bytes())["url"]
        servers.append(_Server(source, server))

    def receive(state: TrainState, report: StepReport) -> None:
        if not servers:
            connect()
        (one,) = servers
        updates.append(one.subscription.update(timeout_s=30))
        tensors = whole(state.tensors())
        one.check({n.removeprefix("model."): t for n, t in tensors.items() if n[:6] == "model."})

    with build(config, mesh_for(config), StopRequest()) as built:
        if config.publish.at_start:
            connect()
            updates.append(servers[0].subscription.update(timeout_s=30))
        train(replace(built.job, hooks=[*built.job.hooks, receive]))
    servers[0].subscription.subscriber.close()
    return updates


def _check(
    pools: Pools, folder: Path, row: tuple[int, dict[str, Any]], more: dict[str, Any], *how: str
) -> None:
    world_size, overrides = row
    for updates in pools(world_size).run(publish_and_receive, folder, {**overrides, **more}, *how):
        assert [update and update.version for update in updates] == [1, 2, 3]


@pytest.mark.parametrize(("trainer", "server", "transport"), rows(ROWS))
def test_weights_arrive_bit_by_bit(
    trainer: str, server: str, transport: str, pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path / "run" / "run", MESHES[trainer], {}, server, transport)


@pytest.mark.parametrize(("trainer", "server", "transport"), rows(EXPERT_ROWS))
def test_experts_arrive_bit_by_bit(
    trainer: str, server: str, transport: str, pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path / "run" / "run", EXPERT_MESHES[trainer], EXPERTS, server, transport)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.matrix)])
def test_versions_may_have_another_dtype(dtype: str, pools: Pools, tmp_path: Path) -> None:
    more = {"training.dtype": "float32", "publish.dtype": dtype}
    folder = tmp_path / "run" / "run"
    _check(pools, folder, MESHES["fsdp-2"], more, "columns-2", "memory")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        ("fsdp-2-tp-2", "columns-3"),
        ("pp-2-fsdp-2", "rows-2-columns-2"),
        ("ep-2-etp-2", "columns-2"),
    ],
)
def test_changes_of_bfloat16_arrive_bit_by_bit(
    trainer: str, server: str, pools: Pools, tmp_path: Path
) -> None:
    experts = EXPERTS if trainer in EXPERT_MESHES else {}
    world_size, overrides = (MESHES | EXPERT_MESHES)[trainer]
    # As in reinforcement learning, most weights change by less than bfloat16 represents.
    small_steps = {"optimizer.lr": 1e-6, "lr_scheduler.warmup_steps": 0}
    changes = {"publish.dtype": "bfloat16", "publish.deltas": True}
    settings = {**overrides, **experts, **small_steps, **changes}
    folder = tmp_path / "run" / "run"
    for updates in pools(world_size).run(publish_and_receive, folder, settings, server, "server"):
        assert [update and update.version for update in updates] == [1, 2, 3]
        for update in updates[1:]:
            assert update is not None and update.num_bytes_received < 0.25 * update.num_bytes


@pytest.mark.parametrize("transport", ["memory", "server"])
def test_initial_weights_are_version_0(transport: str, pools: Pools, tmp_path: Path) -> None:
    world_size, overrides = MESHES["fsdp-2"]
    # A server keeps what was read for a moment, longer than these steps take.
    settings = {**overrides, "publish.at_start": True, "publish.when_in_use": "wait"}
    folder = tmp_path / "run" / "run"
    how = (settings, "columns-2", transport)
    for updates in pools(world_size).run(publish_and_receive, folder, *how):
        assert [update and update.version for update in updates] == [0, 1, 2, 3]


def version_for_texts(folder: Path, run_id: str) -> int:
    """Return the version that this rank generates texts with, if rank 1 does not see the newest of
    two yet."""
    mesh = mesh_for(odd_config(folder, {}))
    weights = {"weight": torch.ones(2, 2)}
    how: dict[str, Any] = {"folder": folder, "model": {}, "secret": SECRET}
    how["identity"] = RunIdentity(run_id, generation_id="0")
    publisher = Publisher(PublishConfig(enable=True, keep_versions=2), weights, mesh, **how)
    for version in (1, 2):
        publisher.publish(version, weights)
    publisher._finish_last()
    mesh.barrier()
    newest = 1 if mesh.rank == 1 else 2
    loaded = cast("LoadedModel", Namespace(model=nn.Linear(2, 2, bias=False), mesh=mesh))
    with patch.object(Subscriber, "newest", lambda self: newest):
        (version,) = generate._versions(Namespace(subscribe=str(folder), versions=1), loaded)
    mesh.barrier()
    publisher.close()
    return version


def test_all_ranks_generate_texts_with_the_same_version(pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "run"
    folder.mkdir(parents=True)
    assert pools(2).run(version_for_texts, folder, secrets.token_hex(16)) == [1, 1]
