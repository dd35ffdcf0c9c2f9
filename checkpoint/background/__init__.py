"""The processes beside a rank's trainer, and its handles of them: the checkpoint writer, which
writes snapshots to storage, and the sender and receiver of buddy copies.

Standard library and xxhash only.
"""

from torchtitan_lite.checkpoint.background.save import SINGLE_REPLICA, WriterGroup

__all__ = ["SINGLE_REPLICA", "WriterGroup"]
