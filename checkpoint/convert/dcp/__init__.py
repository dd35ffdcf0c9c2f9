"""Conversion from and to torch DCP checkpoints with torchtitan's names."""

from torchtitan_lite.checkpoint.convert.dcp.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.convert.dcp.from_dcp import convert_from_dcp
from torchtitan_lite.checkpoint.convert.dcp.to_dcp import convert_to_dcp

__all__ = ["DcpFolder", "convert_from_dcp", "convert_to_dcp"]
