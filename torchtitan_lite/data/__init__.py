"""Data: corpora, tokenizer, packing and the sample order.

Which samples a step uses, and in which order, is a pure function of the settings, the seed and the
cursor, independent of the ranks. Names are imported when first used: processes that tokenize import
this package and no torch.
"""

from typing import TYPE_CHECKING

from torchtitan_lite.core.lazy_names import lazy_names

# The function has the name of its module: imported later, it would be hidden by the module.
from torchtitan_lite.data.batch_sizes import BatchSizes, batch_sizes

if TYPE_CHECKING:
    from torchtitan_lite.data.held_out import ValidationData
    from torchtitan_lite.data.loader import DataLoader
    from torchtitan_lite.data.node_streams import share_streams_on_node
    from torchtitan_lite.data.opening import OpenedData, open_data, open_validation
    from torchtitan_lite.data.order import SampleOrder, microbatch_indices
    from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

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

_MODULES = {
    "held_out": ("ValidationData",),
    "loader": ("DataLoader",),
    "node_streams": ("share_streams_on_node",),
    "opening": ("OpenedData", "open_data", "open_validation"),
    "order": ("SampleOrder", "microbatch_indices"),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}
__getattr__ = lazy_names(__name__, _MODULES)
