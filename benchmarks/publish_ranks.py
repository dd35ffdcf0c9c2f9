"""The processes of the publish benchmark: ranks of a trainer (FSDP) and of a server (TP), two
worlds on one machine, that turn by turn move a version of the weights in one of several ways.

A version differs from the one before in a chosen share of the trainer's shards, or of the elements
of each shard. Every variant ends with the weights in the same tensors of the server ranks, which
compare them with what they compute themselves. Peers send everything in every version; their
targets are cleared first.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint_state import sharded, sharding_mesh
from benchmarks.processes import ChildFailed
from benchmarks.state_dicts import STATES, tp
from benchmarks.worker import alternate
from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import HolderMesh
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.serving.publish import Subscriber, Subscription, Target
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import PUBLISHED_FILE, read_json

NUM_TRAINERS, NUM_SERVERS = 4, 2
OURS = ("memory", "sockets")
SHARES = {"shards": (1.0, 0.1, 0.01), "elements": (0.1, 0.01)}
"""Shares by what changes."""
VARIANTS = {"shards": (*OURS, "broadcast", "file"), "elements": ("sockets", "broadcast")}
"""Variants by what changes. If elements do, deltas are published, which only sockets use."""
COPY = "copy"
"""Variant that copies the shards into other memory of the trainer: the floor of its stall."""
SECRET = "0123456789abcdef0123456789abcdef"
_TIMEOUT = timedelta(seconds=120)


def turn_name(share: float, variant: str) -> str:
    """Key of the turns of a variant in which a share of the shards has changed."""
    return f"{share} {variant}"


def train(
    state: str, changes: str, rounds: int, port: int, run_id: str, folder: str, file: str
) -> dict[str, list[Sequence[float]]]:
    """A rank of the trainer; return when it began to publish, and when it could go on, for each
    turn."""
    mesh = sharding_mesh(port=port)
    trainer = _Trainer(mesh, state, changes, port, run_id, Path(folder), Path(file))
    turns = _alternate(trainer.turn, changes, rounds)
    trainer.close()
    dist.destroy_process_group()
    return turns


def serve(
    state: str, changes: str, rounds: int, port: int, run_id: str, folder: str, file: str
) -> dict[str, list[Sequence[float]]]:
    """A rank of the server; return when it had all weights, bytes received, and tensors that are
    wrong, for each turn."""
    dist.init_process_group("gloo")
    server = _Server(state, changes, port, Path(folder), Path(file))
    turns = _alternate(server.turn, changes, rounds)
    server.close()
    dist.destroy_process_group()
    return turns


def _alternate(
    turn: Callable[[float, str], Sequence[float]], changes: str, rounds: int
) -> dict[str, list[Sequence[float]]]:
    """Take all turns, in the same order on every rank."""
    turns = {
        turn_name(share, variant): partial(turn, share, variant)
        for share in SHARES[changes]
        for variant in VARIANTS[changes]
    }
    turns[COPY] = partial(turn, 0.0, COPY)
    return alternate(turns, rounds, shuffled=True)


class _Rank:
    """Base of the ranks of both worlds: the model, its changes, and groups across."""

    def __init__(self, state: str, changes: str, port: int, number: int) -> None:
        """`number` counts the ranks of both worlds, trainers first."""
        self._shapes, self._changes = STATES[state], changes
        self._num_changes = 0
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=number == 0,
            timeout=_TIMEOUT,
            wait_for_workers=False,
        )
        self._everyone = self._group(store, "everyone", number, NUM_TRAINERS + NUM_SERVERS)
        # As in frameworks of reinforcement learning: one trainer sends to all servers.
        self._sender: Any = (
            None
            if 0 < number < NUM_TRAINERS
            else self._group(store, "sender", max(0, number - NUM_TRAINERS + 1), 1 + NUM_SERVERS)
        )

    @staticmethod
    def _group(store: TCPStore, name: str, number: int, size: int) -> Any:
        return dist.ProcessGroupGloo(PrefixStore(name, store), number, size, timeout=_TIMEOUT)

    def _barrier(self) -> None:
        self._everyone.barrier().wait()

    def _whole(self) -> dict[str, torch.Tensor]:
        """The weights of the first version."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(shape, generator=generator) for name, shape in self._shapes.items()
        }

    def _change(self, share: float, shards: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Change about this share of the weights, as far as they are in `shards`, by name and
        trainer: of whole shards not more."""
        self._num_changes += 1
        names = [(name, rank) for name in self._shapes for rank in range(NUM_TRAINERS)]
        sizes = {
            name: torch.Size(shape).numel() // NUM_TRAINERS for name, shape in self._shapes.items()
        }
        if self._changes == "elements":
            for index, (name, rank) in enumerate(names):
                if (name, rank) in shards:
                    draws = torch.Generator().manual_seed(self._num_changes * len(names) + index)
                    drawn = torch.rand(sizes[name], generator=draws)
                    shards[name, rank].view(torch.int32).view(-1).add_(drawn < share)
            return
        left = share * NUM_TRAINERS * sum(sizes.values())
        random.Random(self._num_changes).shuffle(names)
        for name, rank in names:
            if sizes[name] <= left:
                left -= sizes[name]
                if (name, rank) in shards:
                    shards[name, rank].view(torch.int32).add_(1)


class _Trainer(_Rank):
    def __init__(
        self,
        mesh: Mesh,
        state: str,
        changes: str,
        port: int,
        run_id: str,
        folder: Path,
        file: Path,
    ) -> None:
        super().__init__(state, changes, port, mesh.rank)
        self._file, self._rank = file, mesh.rank
        self._tensors: dict[str, DTensor] = {}
        for name, whole in self._whole().items():
            own = whole.chunk(NUM_TRAINERS)[mesh.rank].clone()
            self._tensors[name] = sharded(tuple(whole.shape), mesh, lambda _, own=own: own)
        self._shards = {name: local_tensor(tensor) for name, tensor in self._tensors.items()}
        self._copies = {name: torch.zeros_like(shard) for name, shard in self._shards.items()}
        self._gathered = (
            {name: torch.zeros(shape) for name, shape in self._shapes.items()}
            if mesh.rank == 0
            else {}
        )
        self._publisher = Publisher(
            # More versions than by default: turns are faster than steps of training, and a version
            # is not overwritten for 0.3 s after a server has sent it.
            PublishConfig(
                enable=True,
                address="127.0.0.1",
                keep_versions=8,
                deltas=changes == "elements",
            ),
            self._tensors,
            mesh,
            identity=RunIdentity(run_id, generation_id="0"),
            folder=folder,
            model={},
            secret=SECRET,
        )
        self._publish()
        self._barrier()
        self._barrier()

    def close(self) -> None:
        self._barrier()
        self._publisher.close()

    def turn(self, share: float, variant: str) -> Sequence[float]:
        if variant in OURS:
            own = {(name, self._rank): shard for name, shard in self._shards.items()}
            self._change(share, own)
        send = {
            "memory": self._publish,
            "sockets": self._publish,
            "broadcast": self._broadcast,
            "file": self._write,
            COPY: self._copy,
        }[variant]
        self._barrier()
        began_s = time.monotonic()
        send()
        ended_s = time.monotonic()
        self._barrier()
        if variant == "file" and self._sender is not None:
            self._file.unlink()
        return began_s, ended_s

    def _publish(self) -> None:
        if not self._publisher.publish(self._num_changes, self._tensors):
            raise ChildFailed(f"Version {self._num_changes} was not published.")

    def _broadcast(self) -> None:
        sent = []
        for name in self._shapes:
            whole = self._gather(name)
            if self._sender is not None:
                sent.append(self._sender.broadcast(whole, 0))
        for work in sent:
            work.wait()

    def _write(self) -> None:
        for name in self._shapes:
            self._gather(name)
        if self._sender is not None:
            save_file(self._gathered, self._file)
            self._sender.barrier().wait()

    def _gather(self, name: str) -> torch.Tensor:
        """Gather a tensor on the first rank; others keep their shards."""
        whole = self._gathered.get(name)
        parts = None if whole is None else list(whole.chunk(NUM_TRAINERS))
        dist.gather(self._shards[name], parts)
        return self._shards[name] if whole is None else whole

    def _copy(self) -> None:
        for name, shard in self._shards.items():
            self._copies[name].copy_(shard)


class _Server(_Rank):
    def __init__(self, state: str, changes: str, port: int, folder: Path, file: Path) -> None:
        self._rank = dist.get_rank()
        super().__init__(state, changes, port, NUM_TRAINERS + self._rank)
        self._file = file
        mesh = HolderMesh.ranks(NUM_SERVERS)
        self._layouts = {name: tp(name, mesh) for name in self._shapes}
        self._expected = self._whole()
        self._received = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        self._parts = {
            name: layout.boxes(self._shapes[name], self._rank)[0].slices
            for name, layout in self._layouts.items()
        }
        self._targets = {
            name: {
                key: torch.zeros(self._expected[key][part].shape)
                for key, part in self._parts.items()
            }
            for name in (*OURS, "peers")
        }
        self._barrier()
        url = read_json((folder / PUBLISHED_FILE).read_bytes())["url"]
        self._subscriptions = {
            "memory": self._subscribe("memory", str(folder)),
            "sockets": self._subscribe("sockets", url),
        }
        for name in OURS:
            self._update(name)
        self._barrier()

    def _subscribe(self, name: str, source: str) -> Subscription:
        targets = [
            Target(key, target, self._layouts[key], self._rank)
            for key, target in self._targets[name].items()
        ]
        return Subscriber(source, secret=SECRET).subscribe(targets)

    def close(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.subscriber.close()
        self._barrier()

    def turn(self, share: float, variant: str) -> Sequence[float]:
        targets = self._targets.get(variant, self._targets["peers"])
        if variant in OURS:
            shards = {
                (name, rank): shard
                for name, whole in self._expected.items()
                for rank, shard in enumerate(whole.chunk(NUM_TRAINERS))
            }
            self._change(share, shards)
        else:
            for target in targets.values():
                target.zero_()
        receive = {
            "memory": partial(self._update, "memory"),
            "sockets": partial(self._update, "sockets"),
            "broadcast": self._receive_broadcast,
            "file": self._read,
            COPY: lambda: 0,
        }[variant]
        self._barrier()
        num_bytes = receive()
        ended_s = time.monotonic()
        self._barrier()
        wrong = 0 if variant == COPY else self._num_wrong(targets)
        if variant in OURS:
            # The other subscription holds the version, too, before it changes again.
            self._update(OURS[variant == OURS[0]])
        return ended_s, num_bytes, wrong

    def _update(self, name: str) -> int:
        update = self._subscriptions[name].update(
            timeout_s=_TIMEOUT.total_seconds(), agree=_smallest
        )
        if update is None or update.version != self._num_changes:
            raise ChildFailed(f"Received {update} instead of version {self._num_changes}.")
        return update.num_bytes_received

    def _receive_broadcast(self) -> int:
        received = [self._sender.broadcast(whole, 0) for whole in self._received.values()]
        for work, (name, whole) in zip(received, self._received.items(), strict=True):
            work.wait()
            self._targets["peers"][name].copy_(whole[self._parts[name]])
        return sum(whole.nbytes for whole in self._received.values())

    def _read(self) -> int:
        self._sender.barrier().wait()
        targets = self._targets["peers"]
        with safe_open(self._file, framework="pt") as file:
            for name, part in self._parts.items():
                targets[name].copy_(file.get_slice(name)[part])
        return sum(target.nbytes for target in targets.values())

    def _num_wrong(self, targets: dict[str, torch.Tensor]) -> int:
        return sum(
            not torch.equal(
                target.view(torch.int32), self._expected[name][self._parts[name]].view(torch.int32)
            )
            for name, target in targets.items()
        )


def _smallest(number: int) -> int:
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)
