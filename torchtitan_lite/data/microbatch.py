"""Building a `Microbatch` from blocks of tokens. A sample's tensors are a function of its block,
its index and the step, independent of the other samples. Layer: above rng, spec and packing."""

from collections.abc import Sequence

import numpy as np
import torch

from torchtitan_lite.data.packing import Blocks
from torchtitan_lite.rng import fold, mix
from torchtitan_lite.spec import IGNORE, Microbatch

FILLER = -1
"""Index of a filler sample, which has no targets."""


def collate(
    blocks: Blocks,
    indices: Sequence[int],
    *,
    seed: int,
    step: int,
    document_mask: bool,
    pin_memory: bool,
) -> Microbatch:
    """Build the microbatch of the samples `indices` with `blocks`. With `document_mask` the last
    token of a document has no target."""
    tokens, documents, are_targets = blocks
    indices_B = np.array(indices, dtype=np.int64)
    targets = np.where(are_targets[:, 1:], tokens[:, 1:], IGNORE)
    if document_mask:
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    targets[indices_B == FILLER] = IGNORE
    keys = mix(np.uint64(fold(seed, "sample", step)) ^ mix(indices_B.view(np.uint64)))
    batch_size, seq_len = targets.shape

    def tensor(array: np.ndarray) -> torch.Tensor:
        as_tensor = torch.from_numpy(np.ascontiguousarray(array))
        return as_tensor.pin_memory() if pin_memory else as_tensor

    return Microbatch(
        tokens_BS=tensor(tokens[:, :-1]),
        targets_BS=tensor(targets),
        positions_BS=tensor(np.tile(np.arange(seq_len, dtype=np.int64), (batch_size, 1))),
        documents_BS=tensor(documents[:, :-1]) if document_mask else None,
        keys_B=tensor(keys.view(np.int64)),
        samples=tuple(int(index) for index in indices_B),
    )
