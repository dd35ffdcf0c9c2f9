"""Saves while training waits: where asynchronous saving is off or has no memory, and of the weights
alone. Layer: above saving and background.
"""

import torch

from torchtitan_lite.checkpoint.background.save import (
    attempt_token,
    commit_parts,
    delete_old,
    part_of,
    write_boxes,
)
from torchtitan_lite.checkpoint.inventory import local_parts, take_inventory
from torchtitan_lite.checkpoint.saving import Saved, attempt
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of
from torchtitan_lite.errors import CheckpointError


def save_now(saved: Saved, *, number: int, model_only: bool = False) -> None:
    """Save the present step durably, in place of one of the same step. `number` tells attempts at
    it apart, and is the same on all ranks. Every rank must call it.

    Raises CheckpointError on all ranks when one of them cannot write; what was written so far is
    removed, and older checkpoints stay as they are.
    """
    mesh, storage, step = saved.mesh, saved.storage, saved.state.step
    tensors, values = saved.state.tensors(), saved.values()
    if model_only:
        dtype = getattr(torch, saved.config.export_dtype)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        values = {"values": {}, "rng": {}, "model_only": True}
    inventory = take_inventory(tensors, mesh)
    about = saved.describe(inventory)
    token = attempt_token(about, number)

    def write() -> None:
        parts = local_parts(tensors, mesh)
        held = {name: bytes_of(part) for name, part in parts.items()}
        views = [
            held[box.tensor][box.start - inventory.starts[box.tensor] :][: box.bytes]
            for box in about.boxes
        ]
        written = write_boxes(storage, about, step, token, views)
        storage.put_part(step, token, mesh.rank, part_of(about, step, values, written))

    problem = attempt(write)
    if not mesh.any(problem is not None) and mesh.is_leader:
        problem = attempt(lambda: commit_parts(storage, about, step, token))
    if mesh.any(problem is not None):
        if mesh.is_leader:
            attempt(lambda: storage.abandon(step, token))
        cause = problem or "another rank could not write"
        raise CheckpointError(f"Step {step} was not saved in {storage.root}: {cause}")
    if mesh.is_leader:
        config = saved.config
        delete_old(storage, step, keep_latest_k=config.keep_latest_k, keep_every=config.keep_every)
