"""A peer: one replica of a minimal trainer written directly on torchft.

It follows torchft's DDP example, with the changes that it needs: torchft's manager with its HTTP
transport; gradients averaged in one flat bucket by `Manager.allreduce`, because torchft's DDP
wrapper fails in a survivor; its optimizer wrapper; a retry of the quorum, without which a dead
lighthouse ends all replicas; a checkpoint of its own every few steps, by `torch.save`. As in the
example, each replica reads its own samples, stores its position in its checkpoint, and continues
with the next batch after an aborted step.

It writes metrics.jsonl as the product does, with the batches used in each step, and starts with
the weights and samples of `baseline_loop.write_replica_batches`.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchft.checkpointing import HTTPTransport
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from benchmarks.baseline import IGNORE_INDEX, Batch, Recipe, adamw, decoder, logits
from torchtitan_lite.core.outputs import RECEIVES_STATE

_TIMEOUT = timedelta(seconds=30)
_QUORUM_RETRIES = 20
_POLL_S = 0.005


class Trainer:
    """One replica."""

    def __init__(self, options: argparse.Namespace) -> None:
        inputs = torch.load(options.inputs, weights_only=True)
        self._recipe = Recipe(**inputs["recipe"])
        self._batches = [Batch(**batch) for batch in inputs["batches"][options.replica]]
        self._model = decoder(inputs["dims"])
        self._model.load_state_dict(inputs["weights"])
        self._optimizer = adamw(self._model, self._recipe)
        for group in self._optimizer.param_groups:
            group["lr"] = inputs["lr"]
        self._position = 0
        own = options.folder / f"replica_{options.replica:03d}"
        self._checkpoint, self._interval = own / "checkpoint.pt", options.checkpoint_interval
        self._metrics = (own / "metrics.jsonl").open("a", buffering=1)
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        self.write(event="start", step=0, dtype=dtype, threads=torch.get_num_threads())
        print("Ready to join.", flush=True)
        restored = self._restore()
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            replica_id=f"replica_{options.replica:05d}",
            hostname="127.0.0.1",
            checkpoint_transport=_Transport(self),
            quorum_retries=_QUORUM_RETRIES,
            # All replicas start with the same weights.
            init_sync=False,
        )
        self._store = store
        if restored is not None:
            self._manager.load_state_dict(restored)
        else:
            # Its heartbeats have begun, so every first quorum includes it.
            _wait_for_all(options.folder, options.replica, options.replicas)

    def train(self) -> None:
        """Train until killed."""
        optimizer = OptimizerWrapper(self._manager, self._optimizer)
        while True:
            position = self._position
            batch = self._batches[position % len(self._batches)]
            self._position += 1
            before = self._manager.current_step()
            optimizer.zero_grad()
            logits_BSV = logits(self._model, batch)
            targets = batch.targets_BS.flatten()
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets, ignore_index=IGNORE_INDEX)
            loss.backward()
            mean_loss = self._average(loss.detach())
            nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.max_norm)
            optimizer.step()
            step = self._manager.current_step()
            if step == before:
                self.write(event="step_failed", step=step, reason=str(self._manager.errored()))
                continue
            count = self._manager.num_participants()
            self.write(
                step=step,
                loss=mean_loss,
                num_target_tokens=count * int((targets != IGNORE_INDEX).sum()),
                num_replicas=count,
                batch=position,
                took_part=self._manager.is_participating(),
            )
            if step % self._interval == 0:
                self._save()

    def write(self, **values: Any) -> None:
        """Write a line of metrics.jsonl."""
        self._metrics.write(json.dumps(values) + "\n")

    def _average(self, loss: torch.Tensor) -> float:
        """Average gradients and loss over the participating replicas."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), loss.view(1)])
        self._manager.allreduce(flat).wait()
        sizes = [*(gradient.numel() for gradient in gradients), 1]
        *parts, mean_loss = flat.split(sizes)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return mean_loss.item()

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _save(self) -> None:
        state = self._state() | {
            "torchft": self._manager.state_dict(),
            "position": self._position,
        }
        temporary = self._checkpoint.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(self._checkpoint)

    def _restore(self) -> dict[str, int] | None:
        """Load the newest checkpoint, if there is one, and return the manager's state."""
        if not self._checkpoint.exists():
            return None
        state = torch.load(self._checkpoint, weights_only=True)
        self._load(state)
        self._position = state["position"]
        return state["torchft"]


class _Transport(HTTPTransport[Any]):
    """torchft's HTTP transport, which records the seconds of a transfer."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(timeout=_TIMEOUT, num_chunks=0)
        self._trainer = trainer

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        print(RECEIVES_STATE, flush=True)
        began_s = time.perf_counter()
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        self._trainer.write(event="healed", step=step, seconds=time.perf_counter() - began_s)
        return state


def _wait_for_all(folder: Path, replica: int, count: int) -> None:
    """Wait for all replicas at the first start, so that the first step has all samples."""
    (folder / f"ready_{replica}").write_text(str(os.getpid()))
    while len(list(folder.glob("ready_*"))) < count:
        time.sleep(_POLL_S)


def main() -> None:
    """Train one replica."""
    parser = argparse.ArgumentParser(description="Train one replica with torchft alone.")
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--checkpoint-interval", type=int, required=True)
    Trainer(parser.parse_args()).train()


if __name__ == "__main__":
    main()
