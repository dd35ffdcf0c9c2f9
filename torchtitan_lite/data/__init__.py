"""Data: corpora, tokenizer, packing and the sample order.

Which samples a step uses, and in which order, is a pure function of the settings, the seed and the
cursor, independent of the ranks. Layer: above errors, log, section, rng and spec; below config.
"""

from torchtitan_lite.data.batch_sizes import BatchSizes, batch_sizes
from torchtitan_lite.data.loader import DataLoader
from torchtitan_lite.data.node_streams import share_streams_on_node
from torchtitan_lite.data.opening import OpenedData, open_data, open_validation
from torchtitan_lite.data.order import SampleOrder, microbatch_indices
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.data.validation import ValidationData

__all__ = [
    "BatchSizes",
    "DataLoader",
    "OpenedData",
    "SampleOrder",
    "Tokenizer",
    "ValidationData",
    "batch_sizes",
    "load_tokenizer",
    "microbatch_indices",
    "open_data",
    "open_validation",
    "share_streams_on_node",
]
