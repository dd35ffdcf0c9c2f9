"""Conversion from and to torch DCP checkpoints with torchtitan's names.

Layer: above the rest of checkpoint/, except the manager.
"""

from torchtitan_lite.checkpoint.interchange.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.interchange.from_dcp import convert_from_dcp
from torchtitan_lite.checkpoint.interchange.to_dcp import convert_to_dcp

__all__ = ["DcpFolder", "convert_from_dcp", "convert_to_dcp"]
