"""Hugging Face folders, as transformers reads and writes them: open, import, export."""

from torchtitan_lite.checkpoint.convert.conversion import TargetExists, check_disk_space
from torchtitan_lite.checkpoint.convert.hugging_face.export import FolderExport
from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    CONFIG,
    GENERATION,
    HuggingFaceFolder,
    check_counts_of,
    is_hugging_face,
    save_assets,
    saved_assets,
)
from torchtitan_lite.checkpoint.convert.hugging_face.from_hf import BLOCK_BYTES, HuggingFaceImport
from torchtitan_lite.checkpoint.convert.hugging_face.shared_export import export_on_all_ranks
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import (
    HuggingFaceSnapshot,
    expand_key,
    match_key,
)
from torchtitan_lite.checkpoint.convert.hugging_face.to_hf import HuggingFaceExport, export_tensors
from torchtitan_lite.checkpoint.convert.hugging_face.to_peft import AdapterExport, peft_module_name

__all__ = [
    "BLOCK_BYTES",
    "CONFIG",
    "GENERATION",
    "AdapterExport",
    "FolderExport",
    "HuggingFaceExport",
    "HuggingFaceFolder",
    "HuggingFaceImport",
    "HuggingFaceSnapshot",
    "TargetExists",
    "check_counts_of",
    "check_disk_space",
    "expand_key",
    "export_on_all_ranks",
    "export_tensors",
    "is_hugging_face",
    "match_key",
    "peft_module_name",
    "save_assets",
    "saved_assets",
]
