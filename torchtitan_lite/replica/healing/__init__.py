"""State from a replica that has it to one that has not: safetensors over HTTP, from live tensors
into live tensors. Layer: above checkpoint; imports nothing else of replica/.

Nothing that is received is unpickled; every piece is checked, and given only to who knows the
token.
"""

from torchtitan_lite.replica.healing.transport import HealingTransport, Source

__all__ = ["HealingTransport", "Source"]
