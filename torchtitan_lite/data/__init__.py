"""Data: corpora, tokenizer, packing and the sample order. Layer: above errors, log, section, rng
and spec; below config.

Invariant: which samples a step uses, and in which order, is a pure function of the settings, the
seed and the cursor, whatever the ranks.
"""

from .config import CorpusConfig, DataConfig, DataLoaderConfig, ValidationConfig
from .loader import DataLoader
from .opening import OpenedData, open_data
from .order import SampleOrder, share_of_step
from .tokenizer import Tokenizer, load_tokenizer
from .validation import ValidationData

__all__ = [
    "CorpusConfig",
    "DataConfig",
    "DataLoader",
    "DataLoaderConfig",
    "OpenedData",
    "SampleOrder",
    "Tokenizer",
    "ValidationConfig",
    "ValidationData",
    "load_tokenizer",
    "open_data",
    "share_of_step",
]
