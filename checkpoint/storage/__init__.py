"""Storages for checkpoints: local folders and object stores, files, and what makes a step complete.

`base` has the `Storage` protocol and `open_storage`, which chooses one by URL. Standard library and
xxhash only; fsspec is imported for URLs.
"""

from torchtitan_lite.checkpoint.format import (
    BYTES_PER_ELEMENT,
    MANIFEST,
    parse_step_name,
    step_name,
)
from torchtitan_lite.checkpoint.storage.base import (
    Storage,
    exists,
    open_parent_storage,
    open_storage,
)
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox, safetensors_header

__all__ = [
    "BYTES_PER_ELEMENT",
    "MANIFEST",
    "PartBox",
    "Storage",
    "exists",
    "open_parent_storage",
    "open_storage",
    "parse_step_name",
    "safetensors_header",
    "step_name",
]
