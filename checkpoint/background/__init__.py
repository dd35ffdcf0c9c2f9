"""The checkpoint writer: a process beside the trainer that writes snapshots to storage.

Standard library and xxhash only.
"""

from torchtitan_lite.checkpoint.background.save import SINGLE_REPLICA, WriterGroup

__all__ = ["SINGLE_REPLICA", "WriterGroup"]
